/* agent_tasks.h */
#include "daemon/agent_tasks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/agent_file_task.h"
#include "daemon/agent_node.h"
#include "daemon/agent_stacks.h"
#include "daemon/keeper_log.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"

enum {
    FOLLOW_MS = 50,        /* a follower of a log looks again this often */
    TELL_MS = 1000,        /* what a task has moved is told this often */
    LOG_BYTES = 256 << 10, /* of a reply, when the task does not say     */
    LOG_BYTES_MAX = 1 << 20,
    /* Work that takes as long as files are large or peers are slow; the agent has 64 threads (agent_main.c), and what
     * starts, commits and checks jobs must find one free. */
    SLOW_AT_ONCE = 32,
    SLOW_OF_A_USER = 16,
};

struct task {
    uv_work_t work;
    struct agent_tasks *tasks;
    struct task *next; /* list of followers */
    Boost__Task *order;
    bool forgotten; /* nobody waits for the reply */
    /* result */
    int rc;
    struct error err;
    /* logs */
    char run_dir[PATH_MAX];
    int64_t deadline_ns;
    int64_t offset;
    struct buffer data;
    size_t wanted;
    bool over; /* no process of the attempt was left when reading began */
    struct agent_stacks stacks;
    /* files */
    struct file_task file;
    int64_t told_done, told_total;
};

struct agent_tasks {
    struct agent *agent;
    uv_timer_t follow, tell;
    struct task *followers; /* waiting for more of a log */
    struct task *working;
    struct task *waiting; /* slow work, in order, for its turn */
    int timers; /* that are not closed; then the last task that a thread still has frees this */
    bool closing;
};

/* ---- replies ---- */

static void free_task(struct task *t)
{
    buffer_free(&t->data);
    agent_stacks_free(&t->stacks);
    file_task_free(&t->file);
    boost__task__free_unpacked(t->order, NULL);
    free(t);
}

static void unlink_task(struct task **list, struct task *t)
{
    for (; *list; list = &(*list)->next) {
        if (*list == t) {
            *list = t->next;
            return;
        }
    }
}

static void reply(struct task *t)
{
    Boost__TaskReply r = BOOST__TASK_REPLY__INIT;
    Boost__Failure failure = BOOST__FAILURE__INIT;
    r.has_id = true;
    r.id = t->order->id;
    if (t->rc) {
        failure.has_code = true;
        failure.code = t->rc;
        failure.message = t->err.message;
        failure.hint = t->err.hint;
        r.failure = &failure;
    } else if (t->order->body_case == BOOST__TASK__BODY_COLLECT_STACKS) {
        r.stacks = t->stacks.list;
        r.n_stacks = t->stacks.n;
    } else if (t->order->body_case == BOOST__TASK__BODY_FIND_CHECKPOINTS) {
        r.found = t->file.found.found;
        r.n_found = t->file.found.n_found;
    } else if (t->order->body_case == BOOST__TASK__BODY_MIRROR_CHECKPOINT ||
               t->order->body_case == BOOST__TASK__BODY_FETCH_DATA || t->order->body_case == BOOST__TASK__BODY_VERIFY) {
        r.has_moved = true;
        r.moved = t->file.moved;
    } else if (t->order->body_case == BOOST__TASK__BODY_CHECKPOINT_TOOL) {
        r.faults = t->file.tool.faults;
        r.n_faults = t->file.tool.n_faults;
        r.text = t->file.tool.text;
    } else if (t->order->body_case == BOOST__TASK__BODY_READ_LOG) {
        r.has_data = r.has_next_offset = r.has_finished = true;
        r.data.data = t->data.data;
        r.data.len = t->data.len;
        r.next_offset = t->offset + (int64_t)t->data.len;
        r.finished = t->over && t->data.len < t->wanted;
    }
    if (!t->forgotten)
        agent_send(t->tasks->agent, BOOST__AGENT_MESSAGE__BODY_TASK, &r.base);
    free_task(t);
}

/* ---- in a thread ---- */

static void run_task(uv_work_t *work)
{
    struct task *t = work->data;
    if (t->order->body_case == BOOST__TASK__BODY_COLLECT_STACKS) {
        t->rc = agent_stacks_collect(&t->stacks, &t->err);
        return;
    }
    if (t->order->body_case != BOOST__TASK__BODY_READ_LOG) {
        t->rc = file_task_run(&t->file, &t->err);
        return;
    }
    const Boost__ReadLog *o = t->order->read_log;
    buffer_clear(&t->data);
    if (t->offset < 0 && o->has_age_ms) {
        t->offset = keeper_log_since(t->run_dir, o->rank, clock_wall_ns() - o->age_ms * NS_PER_MS);
        if (t->offset < 0) { /* nothing is that new: what comes next */
            t->rc = keeper_log_end(t->run_dir, o->rank, &t->offset, &t->err);
            if (t->rc)
                return;
        }
    }
    t->rc = keeper_log_read(t->run_dir, o->rank, &t->offset, o->has_tail_lines ? o->tail_lines : -1, t->wanted,
                            &t->data, &t->err);
}

/* ---- on the loop ---- */

static void look_again(uv_timer_t *timer);
static void work(struct task *t);

static bool is_slow(const struct task *t)
{
    return t->order->body_case == BOOST__TASK__BODY_CHECKPOINT_TOOL ||
           t->order->body_case == BOOST__TASK__BODY_MIRROR_CHECKPOINT ||
           t->order->body_case == BOOST__TASK__BODY_FETCH_DATA;
}

static bool has_turn(const struct agent_tasks *tasks, const struct task *t)
{
    int all = 0, user = 0;
    for (const struct task *w = tasks->working; w && is_slow(t); w = w->next) {
        all += is_slow(w);
        user += is_slow(w) && w->order->uid == t->order->uid;
    }
    return all < SLOW_AT_ONCE && user < SLOW_OF_A_USER;
}

static void start_waiting(struct agent_tasks *tasks)
{
    for (struct task **at = &tasks->waiting; *at;) {
        struct task *t = *at;
        if (has_turn(tasks, t)) {
            *at = t->next;
            work(t);
        } else {
            at = &t->next;
        }
    }
}

static void wait_for_more(struct task *t)
{
    struct agent_tasks *tasks = t->tasks;
    t->next = tasks->followers;
    tasks->followers = t;
    if (!uv_is_active((uv_handle_t *)&tasks->follow))
        uv_timer_start(&tasks->follow, look_again, FOLLOW_MS, 0);
}

static void task_done(uv_work_t *work, int status)
{
    struct task *t = work->data;
    struct agent_tasks *tasks = t->tasks;
    unlink_task(&tasks->working, t);
    if (status == UV_ECANCELED || tasks->closing) {
        free_task(t);
        if (!tasks->timers && !tasks->working)
            free(tasks);
        return;
    }
    start_waiting(tasks);
    bool wait = !t->rc && t->order->body_case == BOOST__TASK__BODY_READ_LOG && !t->data.len && !t->over &&
                clock_mono_ns() < t->deadline_ns && !t->forgotten;
    if (!wait) {
        reply(t);
        return;
    }
    wait_for_more(t);
}

static void tell(uv_timer_t *timer)
{
    struct agent_tasks *tasks = timer->data;
    for (struct task *t = tasks->working; t; t = t->next) {
        int64_t done = atomic_load(&t->file.progress.done), total = atomic_load(&t->file.progress.total);
        if (t->forgotten || (done == t->told_done && total == t->told_total))
            continue;
        Boost__TaskProgress p = BOOST__TASK_PROGRESS__INIT;
        p.has_id = p.has_done = p.has_total = true;
        p.id = t->order->id;
        p.done = t->told_done = done;
        p.total = t->told_total = total;
        agent_send(tasks->agent, BOOST__AGENT_MESSAGE__BODY_TASK_PROGRESS, &p.base);
    }
    if (!tasks->working)
        uv_timer_stop(timer);
}

static void work(struct task *t)
{
    struct agent_tasks *tasks = t->tasks;
    if (!uv_is_active((uv_handle_t *)&tasks->tell))
        uv_timer_start(&tasks->tell, tell, TELL_MS, TELL_MS);
    t->next = tasks->working;
    tasks->working = t;
    uv_queue_work(tasks->agent->loop, &t->work, run_task, task_done);
}

static void queue_task(struct task *t)
{
    struct task **at = &t->tasks->waiting;
    if (has_turn(t->tasks, t)) {
        work(t);
        return;
    }
    while (*at)
        at = &(*at)->next;
    t->next = NULL;
    *at = t;
}

/* Where the log is, and whether it can still grow. */
static int place_log(struct task *t)
{
    struct agent *agent = t->tasks->agent;
    int32_t attempt = t->order->read_log->attempt;
    const struct agent_attempt *a = attempts_find(agent, t->order->job, attempt);
    t->over = !a || a->state == ATTEMPT_ENDED;
    if (a) {
        snprintf(t->run_dir, sizeof t->run_dir, "%s", a->run_dir);
        return ERR_OK;
    }
    int used = snprintf(t->run_dir, sizeof t->run_dir, "%s/%s-%lld.%d", agent->logs_dir, agent->store_id,
                        (long long)t->order->job, attempt);
    if (used < 0 || (size_t)used >= sizeof t->run_dir || !fs_exists(t->run_dir)) {
        error_set(&t->err, ERR_NOT_FOUND, "node %s has no log of attempt %lld.%d", agent->node,
                  (long long)t->order->job, attempt);
        return error_hint(&t->err, "old logs are removed beyond log_keep_bytes of the agent's configuration");
    }
    return ERR_OK;
}

static void read_log(struct task *t)
{
    const struct agent_attempt *a = attempts_find(t->tasks->agent, t->order->job, t->order->read_log->attempt);
    if (a && a->going) { /* between two places, for some milliseconds */
        wait_for_more(t);
        return;
    }
    t->rc = place_log(t);
    if (!t->rc)
        queue_task(t);
    else if (clock_mono_ns() < t->deadline_ns) /* its start may still be on the way */
        wait_for_more(t);
    else
        reply(t);
}

static void look_again(uv_timer_t *timer)
{
    struct agent_tasks *tasks = timer->data;
    struct task *list = tasks->followers;
    tasks->followers = NULL;
    while (list) {
        struct task *t = list;
        list = t->next;
        read_log(t);
    }
}

void agent_tasks_wake(struct agent *agent)
{
    if (agent->tasks && agent->tasks->followers)
        uv_timer_start(&agent->tasks->follow, look_again, 0, 0);
}

void agent_tasks_cancel(struct agent *agent, uint64_t id)
{
    for (struct task *t = agent->tasks->waiting, *next; t; t = next) {
        next = t->next;
        if (t->order->id == id && t->order->body_case == BOOST__TASK__BODY_FETCH_DATA) {
            unlink_task(&agent->tasks->waiting, t);
            free_task(t);
        }
    }
    for (struct task *t = agent->tasks->working; t; t = t->next)
        if (t->order->id == id && t->order->body_case == BOOST__TASK__BODY_FETCH_DATA) {
            atomic_store(&t->file.stop, true);
            t->forgotten = true;
        }
}

void agent_tasks_stop(struct agent *agent)
{
    for (struct task *t = agent->tasks ? agent->tasks->working : NULL; t; t = t->next)
        atomic_store(&t->file.stop, true);
}

static void free_list(struct task **list)
{
    while (*list) {
        struct task *t = *list;
        *list = t->next;
        free_task(t);
    }
}

void agent_tasks_forget(struct agent *agent)
{
    struct agent_tasks *tasks = agent->tasks;
    for (struct task *t = tasks->working; t; t = t->next)
        t->forgotten = true;
    free_list(&tasks->followers);
    free_list(&tasks->waiting);
}

void agent_tasks_take(struct agent *agent, const Boost__Task *order)
{
    struct task *t = calloc(1, sizeof *t);
    if (t)
        t->order = (Boost__Task *)reflect_clone(&order->base);
    if (!t || !t->order) {
        log_line(LOG_ERROR, "no memory for a task of the controller");
        free(t);
        return;
    }
    t->tasks = agent->tasks;
    t->work.data = t;
    buffer_init(&t->data, LOG_BYTES_MAX + 1);
    file_task_init(&t->file, agent, t->order, devices_count(agent->devices) > 0);
    if (order->body_case == BOOST__TASK__BODY_COLLECT_STACKS) {
        t->rc = agent_stacks_prepare(agent, order->job, t->order->collect_stacks, &t->stacks, &t->err);
        if (t->rc) {
            reply(t);
            return;
        }
    }
    if (order->body_case != BOOST__TASK__BODY_READ_LOG) {
        queue_task(t);
        return;
    }
    const Boost__ReadLog *o = t->order->read_log;
    t->offset = o->has_offset && o->offset >= 0 ? o->offset : -1;
    t->wanted = o->max_bytes > 0 ? (size_t)o->max_bytes : LOG_BYTES;
    t->wanted = t->wanted < LOG_BYTES_MAX ? t->wanted : LOG_BYTES_MAX;
    t->deadline_ns = clock_mono_ns() + (o->wait_ms > 0 ? o->wait_ms : 0) * NS_PER_MS;
    read_log(t);
}

int agent_tasks_create(struct agent *agent, struct agent_tasks **out, struct error *err)
{
    struct agent_tasks *tasks = calloc(1, sizeof *tasks);
    if (!tasks)
        return error_set(err, ERR_NOMEM, "no memory for tasks");
    tasks->agent = agent;
    uv_timer_init(agent->loop, &tasks->follow);
    uv_timer_init(agent->loop, &tasks->tell);
    tasks->timers = 2;
    tasks->follow.data = tasks->tell.data = tasks;
    *out = tasks;
    return ERR_OK;
}

static void timer_closed(uv_handle_t *handle)
{
    struct agent_tasks *tasks = handle->data;
    if (--tasks->timers == 0 && !tasks->working)
        free(tasks);
}

void agent_tasks_close(struct agent_tasks *tasks)
{
    if (!tasks)
        return;
    tasks->closing = true;
    agent_tasks_forget(tasks->agent);
    for (struct task *t = tasks->working; t; t = t->next)
        uv_cancel((uv_req_t *)&t->work);
    uv_close((uv_handle_t *)&tasks->follow, timer_closed);
    uv_close((uv_handle_t *)&tasks->tell, timer_closed);
}
