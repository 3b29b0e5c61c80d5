/* agent_health.h */
#include "daemon/agent_health.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/agent_node.h"
#include "daemon/log.h"
#include "proto/base/buffer.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"

enum {
    RETRY_MS = 10000,   /* at the latest, after a check that failed */
    LEFTOVER_MS = 1000, /* after a kill of what an attempt has left */
    DEAD_MS = 3000,     /* by then it should be gone */
    TEXT = 2048,
};

struct agent_health {
    struct agent *agent;
    uv_work_t work;
    bool checking, again, closing, checked, asked;
    int64_t next_ns; /* of the next check, 0: none is planned */
    /* the thread's, while `checking` */
    struct findings next;
    struct buffer live; /* names of attempts that lived as it began, for leftovers_find() */
    struct leftover seen[LEFTOVERS_MAX];
    int n_seen;
    /* the loop's */
    struct findings now;         /* of the newest check */
    struct findings scripts;     /* prolog, epilog */
    struct killed {
        struct procid id;
        int64_t since; /* monotonic; of the first kill */
    } killed[LEFTOVERS_MAX]; /* what ended attempts had left at the newest check */
    int n_killed;
    struct buffer report, told;  /* packed HealthReports: the last one made, the last one that got through */
    struct findings last_logged; /* so that the same trouble is logged once */
};

/* ---- what ended attempts have left ---- */

static const char *attempt_name(const struct agent_attempt *a)
{
    return strrchr(a->run_dir, '/') + 1;
}

static void list_live(struct agent_health *h)
{
    buffer_clear(&h->live);
    for (const struct agent_attempt *a = h->agent->attempts; a; a = a->next)
        if (attempt_alive(a))
            buffer_append(&h->live, attempt_name(a), strlen(attempt_name(a)) + 1);
    buffer_append(&h->live, "", 1);
}

/* Not of an attempt that has come meanwhile, nor another user's that only says it is one's. */
static bool is_leftover(const struct agent *agent, const struct leftover *x)
{
    for (const struct agent_attempt *a = agent->attempts; a; a = a->next)
        if (strcmp(attempt_name(a), x->attempt) == 0)
            return !attempt_alive(a) && a->uid == x->uid;
    return true;
}

static int64_t killed_since(const struct agent_health *h, const struct procid *id, int64_t now)
{
    for (int i = 0; i < h->n_killed; i++)
        if (h->killed[i].id.pid == id->pid && h->killed[i].id.start == id->start)
            return h->killed[i].since;
    return now;
}

/* What the thread saw is killed. The node is unfit when one and the same process outlives that: new ones every second
 * are their user's doing. */
static void end_leftovers(struct agent_health *h, int64_t now)
{
    struct killed killed[LEFTOVERS_MAX];
    int n = 0;
    for (int i = 0; i < h->n_seen; i++) {
        const struct leftover *x = &h->seen[i];
        if (!is_leftover(h->agent, x) || procid_signal(&x->id, SIGKILL, NULL) == ERR_NOT_FOUND)
            continue;
        if (!n)
            log_line(LOG_WARN, "process %ld (%s) was left by attempt %s, which is over: killed", (long)x->id.pid,
                     x->name, x->attempt);
        killed[n] = (struct killed){.id = x->id, .since = killed_since(h, &x->id, now)};
        if (now - killed[n].since >= DEAD_MS * NS_PER_MS)
            finding_set(&h->now, "leftover", "process %ld (%s) of attempt %s, which is over, cannot be killed",
                        (long)x->id.pid, x->name, x->attempt);
        n++;
    }
    for (int i = 0; i < n; i++)
        h->killed[i] = killed[i];
    h->n_killed = n;
    if (n)
        h->next_ns = now + LEFTOVER_MS * NS_PER_MS;
}

/* ---- checking ---- */

static void check(uv_work_t *work)
{
    struct agent_health *h = work->data;
    h->next.n = 0;
    checks_at_once(h->agent->config, &h->next);
    check_script(h->agent->config, h->agent->node, NULL, &h->next);
    h->n_seen = leftovers_find(h->agent->attempts_dir, h->live.len ? (const char *)h->live.data : "", h->seen);
}

static void log_changes(struct agent_health *h)
{
    char text[TEXT], was[TEXT];
    findings_text(&h->now, text, sizeof text);
    findings_text(&h->last_logged, was, sizeof was);
    if (strcmp(text, was) != 0)
        log_line(*text ? LOG_WARN : LOG_INFO, "health check: %s", *text ? text : "passed again");
    h->last_logged = h->now;
}

static void plan_next(struct agent_health *h, int64_t now)
{
    int64_t interval = h->agent->config->health_interval_ms;
    if (h->now.n && (!interval || interval > RETRY_MS))
        interval = RETRY_MS;
    h->next_ns = interval ? now + interval * NS_PER_MS : 0;
}

static void finish(struct agent_health *h, int64_t now)
{
    h->checked = true;
    h->now = h->next;
    plan_next(h, now);
    end_leftovers(h, now);
    log_changes(h);
}

static void begin(struct agent_health *h);

static void checked(uv_work_t *work, int status)
{
    struct agent_health *h = work->data;
    h->checking = false;
    if (status == UV_ECANCELED || h->closing || h->agent->closing)
        return;
    finish(h, clock_mono_ns());
    if (h->now.n) /* told again: the controller may have lifted the cordon meanwhile */
        buffer_clear(&h->told);
    if (h->again)
        begin(h);
    health_run(h->agent, clock_mono_ns());
}

static void begin(struct agent_health *h)
{
    h->again = false;
    h->next_ns = 0;
    list_live(h);
    h->checking = uv_queue_work(h->agent->loop, &h->work, check, checked) == 0;
}

/* ---- telling ---- */

static bool add_findings(Boost__HealthReport *r, const struct findings *list, struct arena *arena)
{
    for (int i = 0; i < list->n; i++) {
        Boost__FailedCheck *f = arena_alloc(arena, sizeof *f);
        if (!f)
            return false;
        boost__failed_check__init(f);
        f->check = arena_strdup(arena, list->items[i].check);
        f->text = arena_strdup(arena, list->items[i].text);
        if (!f->check || !f->text)
            return false;
        r->failed[r->n_failed++] = f;
    }
    return true;
}

Boost__HealthReport *health_report(struct agent *agent, struct arena *arena)
{
    struct agent_health *h = agent->health;
    struct findings gpus = {.n = 0};
    char text[FINDING_TEXT];
    Boost__HealthReport *r = arena_alloc(arena, sizeof *r);
    if (!r)
        return NULL;
    boost__health_report__init(r);
    if (devices_unsound(agent, text, sizeof text))
        finding_set(&gpus, "device", "%s", text);
    r->failed = arena_alloc(arena, 3 * FINDINGS_MAX * sizeof *r->failed);
    if (!r->failed || !add_findings(r, &gpus, arena) || !add_findings(r, &h->now, arena) ||
        !add_findings(r, &h->scripts, arena))
        return NULL;
    r->has_pending = true;
    r->pending = !h->checked;
    buffer_clear(&h->report);
    uint8_t *at = buffer_reserve(&h->report, boost__health_report__get_packed_size(r));
    if (at)
        h->report.len = boost__health_report__pack(r, at);
    return r;
}

void health_told(struct agent_health *h)
{
    buffer_clear(&h->told);
    buffer_append(&h->told, h->report.data, h->report.len);
}

static void tell(struct agent *agent)
{
    enum { ARENA = 1 << 20 };
    struct agent_health *h = agent->health;
    struct arena arena;
    if (!link_up_ready(agent->link))
        return;
    arena_init(&arena, ARENA);
    Boost__HealthReport *r = health_report(agent, &arena);
    bool asked = h->asked && !h->checking;
    bool same = h->report.len == h->told.len && memcmp(h->report.data, h->told.data, h->report.len) == 0;
    if (r && (!same || asked) && agent_send(agent, BOOST__AGENT_MESSAGE__BODY_HEALTH, &r->base)) {
        health_told(h);
        h->asked = h->asked && !asked;
    }
    arena_free(&arena);
}

/* ---- what outlives the agent ---- */

/* state_dir/unfit.pb: what prolog and epilog have shown, until an operator says that it is mended. */
static bool unfit_path(const struct agent *agent, char path[PATH_MAX])
{
    return !fs_join(path, PATH_MAX, NULL, agent->state_dir, "unfit.pb");
}

static void save_scripts(struct agent_health *h)
{
    enum { ARENA = 1 << 20 };
    char path[PATH_MAX];
    struct arena arena;
    struct error err;
    Boost__HealthReport r = BOOST__HEALTH_REPORT__INIT;
    if (!unfit_path(h->agent, path))
        return;
    if (!h->scripts.n) {
        if (unlink(path) < 0 && errno != ENOENT)
            log_line(LOG_WARN, "cannot remove %s: %s", path, strerror(errno));
        return;
    }
    arena_init(&arena, ARENA);
    r.failed = arena_alloc(&arena, FINDINGS_MAX * sizeof *r.failed);
    bool ok = r.failed && add_findings(&r, &h->scripts, &arena);
    size_t len = ok ? boost__health_report__get_packed_size(&r) : 0;
    uint8_t *packed = ok ? arena_alloc(&arena, len) : NULL;
    if (packed) {
        boost__health_report__pack(&r, packed);
        if (fs_write_durable(path, packed, len, 0600, &err))
            log_error(LOG_WARN, &err, "another agent will not know of this failure");
    }
    arena_free(&arena);
}

static void load_scripts(struct agent_health *h)
{
    char path[PATH_MAX];
    struct buffer packed;
    buffer_init(&packed, LIMIT_FRAME);
    Boost__HealthReport *r = NULL;
    if (unfit_path(h->agent, path) && !fs_read_regular(path, &packed, NULL) && packed.len)
        r = boost__health_report__unpack(NULL, packed.len, packed.data);
    if (packed.len && !r)
        log_line(LOG_WARN, "%s is damaged and counts for nothing", path);
    for (size_t i = 0; r && i < r->n_failed; i++)
        if (r->failed[i]->check && r->failed[i]->text)
            finding_set(&h->scripts, r->failed[i]->check, "%s", r->failed[i]->text);
    if (r)
        boost__health_report__free_unpacked(r, NULL);
    buffer_free(&packed);
}

/* ---- what others call ---- */

int health_open(struct agent *agent, struct agent_health **out, struct error *err)
{
    struct agent_health *h = calloc(1, sizeof *h);
    if (!h)
        return error_set(err, ERR_NOMEM, "no memory for the health checks");
    h->agent = agent;
    h->work.data = h;
    buffer_init(&h->report, LIMIT_FRAME);
    buffer_init(&h->told, LIMIT_FRAME);
    buffer_init(&h->live, LIMIT_FRAME);
    load_scripts(h);
    if (*agent->config->health_script) {
        begin(h);
    } else {
        list_live(h);
        check(&h->work);
        finish(h, clock_mono_ns());
    }
    *out = h;
    return ERR_OK;
}

bool health_busy(const struct agent_health *h)
{
    return h && h->checking;
}

void health_close(struct agent_health *h)
{
    if (!h)
        return;
    h->closing = true;
    buffer_free(&h->report);
    buffer_free(&h->told);
    buffer_free(&h->live);
    free(h);
}

void health_run(struct agent *agent, int64_t now)
{
    struct agent_health *h = agent->health;
    if (!h) /* the first look at the GPUs still runs the loop */
        return;
    if (!h->checking && h->next_ns && now >= h->next_ns)
        begin(h);
    tell(agent);
}

void health_ask(struct agent *agent, bool mended)
{
    struct agent_health *h = agent->health;
    h->asked = true;
    if (mended && h->scripts.n) {
        h->scripts.n = 0;
        save_scripts(h);
    }
    if (h->checking)
        h->again = true; /* what it has seen already may be older than the question */
    else
        begin(h);
}

void health_found(struct agent *agent, const struct findings *found)
{
    struct agent_health *h = agent->health;
    for (int i = 0; i < found->n; i++)
        finding_set(&h->now, found->items[i].check, "%s", found->items[i].text);
    if (found->n && !h->checking)
        plan_next(h, clock_mono_ns());
    log_changes(h);
    tell(agent);
}

void health_failed(struct agent *agent, const char *name, const char *text)
{
    log_line(LOG_ERROR, "%s: %s", name, text);
    if (!agent->health)
        return;
    finding_set(&agent->health->scripts, name, "%s", text);
    save_scripts(agent->health);
    tell(agent);
}
