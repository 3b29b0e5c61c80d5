/* D39: what the controller keeps of the output of an attempt that failed. */
#include "tests/unit/daemon/core_world.h"

static struct {
    int puts, gets;
    int64_t job;
    int attempt;
    uint8_t packed[256 << 10];
    size_t len;
} disk;

static void keep(void *arg, int64_t job, int attempt, const void *packed, size_t len)
{
    (void)arg;
    assert_true(len <= sizeof disk.packed);
    memcpy(disk.packed, packed, len);
    disk.len = len;
    disk.job = job;
    disk.attempt = attempt;
    disk.puts++;
}

static void give(void *arg, int64_t job, int attempt, void (*done)(void *, const void *, size_t), void *done_arg)
{
    (void)arg;
    bool there = disk.puts && job == disk.job && attempt == disk.attempt;
    disk.gets++;
    done(done_arg, there ? disk.packed : NULL, there ? disk.len : 0);
}

static struct {
    char text[128 << 10], note[256];
    size_t len;
} seen;

static void on_log(void *arg, int rc, const struct error *err, const struct core_log *log)
{
    (void)arg;
    (void)err;
    assert_int_equal(rc, ERR_OK);
    assert_true(log->len < sizeof seen.text);
    if (log->len)
        memcpy(seen.text, log->data, log->len);
    seen.text[log->len] = '\0';
    seen.len = log->len;
    snprintf(seen.note, sizeof seen.note, "%s", log->note ? log->note : "");
}

static void read_log(struct world *w, int64_t id, int rank)
{
    Boost__LogsRequest r = BOOST__LOGS_REQUEST__INIT;
    r.has_rank = r.has_attempt = 1;
    r.rank = rank;
    r.attempt = 1;
    memset(&seen, 0, sizeof seen);
    core_read_log(w->core, job_of(w, id), &r, on_log, w);
    pump(w);
}

static void say_tail(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, const char *text)
{
    Boost__LogTail t = BOOST__LOG_TAIL__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    t.has_job = t.has_attempt = t.has_rank = t.has_data = 1;
    t.job = x->job;
    t.attempt = x->attempt;
    t.rank = x->ranks[i];
    t.data.data = (uint8_t *)(uintptr_t)text;
    t.data.len = strlen(text);
    m.body_case = BOOST__AGENT_MESSAGE__BODY_LOG_TAIL;
    m.log_tail = &t;
    say(w, a->name, &m);
    pump(w);
}

static struct world *world_with_a_disk(void)
{
    struct world *w = world_new();
    memset(&disk, 0, sizeof disk);
    w->ops.keep_logs = keep;
    w->ops.kept_logs = give;
    controller_restart(w);
    return w;
}

static void of_a_lost_node_what_its_ranks_said_while_they_ran(void **state)
{
    (void)state;
    struct world *w = world_with_a_disk();
    struct fake_agent *a = agent_add(w, "n1", 2);
    static char words[10000];
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    memset(words, 'x', sizeof words - 1);
    memcpy(words + sizeof words - 6, "last\n", 5);
    say_tail(w, a, x, 1, "earlier\n");
    say_tail(w, a, x, 1, words);
    disconnect(w, a);
    a->beating = false;
    read_log(w, id, 1);
    assert_int_equal(seen.len, 4096);
    assert_string_equal(seen.text + 4096 - 5, "last\n");
    assert_says(seen.note, "n1 cannot be reached: the last 4096 bytes that the controller kept");
    assert_int_equal(disk.puts, 0);
    for (int i = 0; i < 100 && job_of(w, id)->state == STATE(RUNNING); i++)
        advance(w, 1000);
    assert_int_equal(disk.puts, 1);
    assert_true(disk.job == id && disk.attempt == 1);
    controller_restart(w);
    read_log(w, id, 1);
    assert_int_equal(disk.gets, 1);
    assert_int_equal(seen.len, 4096);
    assert_string_equal(seen.text + 4096 - 5, "last\n");
    assert_says(seen.note, "n1 cannot be reached: the last 4096 bytes that the controller kept");
    read_log(w, id, 0);
    assert_says(seen.note, "kept nothing of this rank's output");
    world_free(w);
}

static void more_of_the_rank_that_failed_first(void **state)
{
    (void)state;
    struct world *w = world_with_a_disk();
    struct fake_agent *a = agent_add(w, "n1", 2);
    static char cause[70000], other[9000];
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    memset(cause, 'c', sizeof cause - 1);
    memset(other, 'o', sizeof other - 1);
    say_tail(w, a, x, 0, "what it said before counts for nothing now");
    say_end_of(w, a, x, 0, (struct end){.signal = 11, .log = cause});
    say_end_of(w, a, x, 1, (struct end){.signal = 9, .killed = true, .log = other});
    say_node_end(w, a, x);
    pump(w);
    assert_int_equal(disk.puts, 1);
    disconnect(w, a);
    a->beating = false;
    controller_restart(w);
    read_log(w, id, 0);
    assert_int_equal(seen.len, 64 << 10);
    assert_true(seen.text[0] == 'c');
    read_log(w, id, 1);
    assert_int_equal(seen.len, 4 << 10);
    assert_true(seen.text[0] == 'o');
    world_free(w);
}

static void nothing_of_one_that_ended_well(void **state)
{
    (void)state;
    struct world *w = world_with_a_disk();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_tail(w, a, x, 0, "all is well\n");
    say_finished(w, a, x);
    pump(w);
    advance(w, 20000);
    assert_state(w, id, COMPLETED);
    assert_int_equal(disk.puts, 0);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(of_a_lost_node_what_its_ranks_said_while_they_ran),
        cmocka_unit_test(more_of_the_rank_that_failed_first),
        cmocka_unit_test(nothing_of_one_that_ended_well),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
