/* agent_node.h */
#include "daemon/agent_node.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_hang.h"
#include "daemon/agent_rendezvous.h"
#include "daemon/agent_script.h"
#include "daemon/agent_tasks.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/validate.h"
#include "proto/version.h"

enum {
    INTERVAL_MS = 200, /* the clock that everything works by when no event comes */
    SOON_MS = 5,       /* gathers events of one moment                           */
    GAP_MS = 2000,     /* longer between two looks: the machine stood still      */
    REGISTER_ARENA = 8 << 20,
    CLOSE_MS = 5000,
    LOCK_MS = 1000, /* a child of an agent that was killed holds its lock until it has run boost-keeper */
};

/* ---- messages ---- */

bool agent_send(struct agent *agent, Boost__AgentMessage__BodyCase kind, const ProtobufCMessage *body)
{
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    m.body_case = kind;
    m.heartbeat = (Boost__Heartbeat *)(uintptr_t)body; /* members of the oneof are all pointers in one union */
    return agent->link && link_up_send(agent->link, &m);
}

/* The attempt may go while it is looked at. */
static void poll_all(struct agent *agent)
{
    for (struct agent_attempt *a = agent->attempts, *next; a; a = next) {
        next = a->next;
        attempt_poll(a);
    }
}

static void on_soon(uv_timer_t *timer)
{
    struct agent *agent = timer->data;
    agent->soon_armed = false;
    poll_all(agent);
}

void agent_poll_soon(struct agent *agent)
{
    if (agent->soon_armed || agent->closing)
        return;
    agent->soon_armed = true;
    uv_timer_start(&agent->soon, on_soon, SOON_MS, 0);
}

static void on_interval(uv_timer_t *timer)
{
    struct agent *agent = timer->data;
    int64_t now = clock_mono_ns(), gap = now - agent->last_poll_ns;
    if (agent->last_poll_ns && gap > GAP_MS * NS_PER_MS) {
        log_line(LOG_WARN, "nothing ran here for %.1f s: hangs are counted anew", (double)gap / (double)NS_PER_S);
        for (struct agent_attempt *a = agent->attempts; a; a = a->next) {
            for (size_t i = 0; i < a->rank_count; i++)
                hang_excuse(&a->ranks[i].hang, gap);
        }
    }
    agent->last_poll_ns = now;
    poll_all(agent);
    devices_run(agent, now);
    health_run(agent, now);
}

/* ---- the controller ---- */

static const Boost__Register *make_register(void *arg)
{
    struct agent *agent = arg;
    struct arena *arena = &agent->register_arena;
    arena_free(arena);
    arena_init(arena, REGISTER_ARENA);
    Boost__Register *r = arena_alloc(arena, sizeof *r);
    if (!r)
        return NULL;
    boost__register__init(r);
    r->node = agent->node;
    r->boot_id = arena_strdup(arena, procid_boot_id());
    r->instance = agent->instance;
    r->has_cpu_slots = r->has_cores = r->has_memory_mib = r->has_uid = true;
    r->cpu_slots = agent->cpu_slots;
    r->cores = agent->cores;
    r->memory_mib = agent->memory_mib;
    r->uid = (uint32_t)geteuid();
    r->data_address = agent->config->data_address;
    r->version = (char *)(uintptr_t)boost_version();
    r->n_label = agent->config->n_label;
    r->label = agent->config->label;
    r->switch_ = agent->config->switch_;
    r->n_env = agent->config->n_env;
    r->env = agent->config->env;
    size_t count = 0;
    for (struct agent_attempt *a = agent->attempts; a; a = a->next)
        count++;
    r->attempts = count ? arena_alloc(arena, count * sizeof *r->attempts) : NULL;
    for (struct agent_attempt *a = agent->attempts; a && r->attempts; a = a->next) {
        Boost__LiveAttempt *live = arena_alloc(arena, sizeof *live);
        if (!live)
            return NULL;
        boost__live_attempt__init(live);
        live->has_job = live->has_attempt = live->has_alive = true;
        live->job = a->job;
        live->attempt = a->attempt;
        live->store_id = a->store_id;
        live->alive = attempt_alive(a);
        live->has_epilog = true;
        live->epilog = a->state == ATTEMPT_ENDED && a->epilog_runs;
        live->n_ranks = a->start->n_ranks;
        live->ranks = a->start->ranks;
        live->has_cuda = true;
        live->cuda = a->start->n_devices > 0;
        r->attempts[r->n_attempts++] = live;
    }
    r->devices = devices_report(agent, arena);
    devices_told(agent->devices);
    r->health = health_report(agent, arena);
    health_told(agent->health);
    return r->n_attempts == count && r->health ? r : NULL;
}

static void on_registered(void *arg, const Boost__Registered *answer)
{
    struct agent *agent = arg;
    if (answer->store_id)
        snprintf(agent->store_id, sizeof agent->store_id, "%s", answer->store_id);
    log_line(LOG_INFO, "registered as node %s with the controller at %s (store %s)", agent->node,
             link_up_where(agent->link), agent->store_id);
    if (!agent->was_registered) {
        printf("boost-agent ready node=%s\n", agent->node);
        fflush(stdout);
    }
    agent->was_registered = true;
    attempts_resend(agent);
    for (size_t i = 0; i < answer->n_verdicts; i++)
        attempts_verdict(agent, answer->verdicts[i]);
    for (struct agent_attempt *a = agent->attempts; a; a = a->next)
        attempt_tell_doing(a);
    rendezvous_resend(agent->rendezvous);
    poll_all(agent);
}

static void on_lost(void *arg)
{
    struct agent *agent = arg;
    attempts_resend(agent);
    agent_tasks_forget(agent);
}

static void on_message(void *arg, const Boost__ControllerMessage *m)
{
    struct agent *agent = arg;
    switch (m->body_case) {
    case BOOST__CONTROLLER_MESSAGE__BODY_START:
        attempts_start(agent, m->start->start);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_STOP:
        attempts_stop(agent, m->stop);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_CHECKPOINT:
        attempts_checkpoint(agent, m->checkpoint);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_ACK:
        attempts_ack(agent, m->ack);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_KV:
        rendezvous_answer(agent->rendezvous, m->kv);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_TASK:
        agent_tasks_take(agent, m->task);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_CANCEL_TASK:
        agent_tasks_cancel(agent, m->cancel_task->id);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_CHECK_HEALTH:
        health_ask(agent, m->check_health->mended);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_FORGET:
        attempts_forget(agent, m->forget->job, m->forget->attempt);
        break;
    default:
        log_line(LOG_WARN, "the controller sent a message that this agent does not know");
        break;
    }
}

/* ---- set-up ---- */

static int take_lock(struct agent *agent, struct error *err)
{
    char path[PATH_MAX];
    int rc = fs_join(path, sizeof path, err, agent->state_dir, "lock");
    if (rc)
        return rc;
    agent->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (agent->lock_fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    char pid[24] = {0};
    int64_t deadline = clock_mono_ns() + LOCK_MS * NS_PER_MS;
    int got;
    while ((got = flock(agent->lock_fd, LOCK_EX | LOCK_NB)) < 0 && errno == EWOULDBLOCK && clock_mono_ns() < deadline)
        poll(NULL, 0, 10);
    if (got == 0) {
        int len = snprintf(pid, sizeof pid, "%ld\n", (long)getpid());
        if (ftruncate(agent->lock_fd, 0) < 0 || pwrite(agent->lock_fd, pid, (size_t)len, 0) != len)
            log_line(LOG_DEBUG, "the lock file does not say whose it is");
        return ERR_OK;
    }
    if (errno != EWOULDBLOCK)
        return error_errno(err, errno, "cannot lock %s", path);
    ssize_t n = pread(agent->lock_fd, pid, sizeof pid - 1, 0);
    pid[n > 0 ? strcspn(pid, "\n") : 0] = '\0';
    error_set(err, ERR_BUSY, "another boost-agent (pid %s) runs with the state directory %s", *pid ? pid : "?",
              agent->state_dir);
    return error_hint(err, "stop it first, or give this one its own with --state-dir and another --node");
}

static int make_dirs(struct agent *agent, struct error *err)
{
    const char *dir = agent->config->state_dir;
    int rc = ERR_OK;
    if (*dir != '/') {
        char cwd[PATH_MAX];
        if (!getcwd(cwd, sizeof cwd))
            return error_errno(err, errno, "no working directory");
        rc = fs_join(agent->state_dir, sizeof agent->state_dir, err, cwd, dir);
    } else {
        rc = fs_join(agent->state_dir, sizeof agent->state_dir, err, dir, "");
    }
    size_t len = strlen(agent->state_dir);
    while (len > 1 && agent->state_dir[len - 1] == '/')
        agent->state_dir[--len] = '\0';
    /* Ranks of other users pass through to their own run directories. */
    if (!rc)
        rc = fs_make_dirs(agent->state_dir, 0711, err);
    if (!rc)
        rc = fs_join(agent->attempts_dir, sizeof agent->attempts_dir, err, agent->state_dir, "attempts");
    if (!rc)
        rc = fs_make_dirs(agent->attempts_dir, 0711, err);
    if (!rc)
        rc = fs_join(agent->logs_dir, sizeof agent->logs_dir, err, agent->state_dir, "logs");
    if (!rc)
        rc = fs_make_dirs(agent->logs_dir, 0700, err);
    if (rc && !*err->hint)
        error_hint(err, "name another state directory with --state-dir");
    return rc;
}

static int identify(struct agent *agent, struct error *err)
{
    cpu_set_t cpus;
    unsigned char random[16];
    const char *name = agent->config->node;
    if (*name)
        snprintf(agent->node, sizeof agent->node, "%s", name);
    else if (gethostname(agent->node, sizeof agent->node) < 0)
        return error_errno(err, errno, "no host name");
    agent->node[sizeof agent->node - 1] = '\0';
    if (!validate_name(agent->node) || strlen(name) >= sizeof agent->node) {
        error_set(err, ERR_INVALID, "node name \"%s\" is not 1 to 64 bytes of [A-Za-z0-9._-]",
                  *name ? name : agent->node);
        return error_hint(err, "set `node` in the configuration or use --node");
    }
    int uv = uv_random(NULL, NULL, random, sizeof random, 0, NULL);
    if (uv)
        return error_set(err, ERR_IO, "no random numbers: %s", uv_strerror(uv));
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(agent->instance + 2 * i, 3, "%02x", random[i]);
    agent->cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    agent->cpu_slots = agent->config->cpu_slots > 0 ? agent->config->cpu_slots : agent->cores;
    uint64_t memory = uv_get_total_memory(), limit = uv_get_constrained_memory();
    agent->memory_mib = (int64_t)((limit && limit < memory ? limit : memory) >> 20); /* in a container, what it may use */
    return ERR_OK;
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct agent *agent = handle->data;
    if (signum == SIGHUP)
        return; /* a closed terminal is no reason to go */
    log_line(LOG_INFO, "signal %d: this agent ends, the ranks go on", signum);
    uv_stop(agent->loop);
}

static void start_handles(struct agent *agent)
{
    struct {
        uv_signal_t *handle;
        int signum;
    } signals[] = {{&agent->term, SIGTERM}, {&agent->intr, SIGINT}, {&agent->hup, SIGHUP}};
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        uv_signal_init(agent->loop, signals[i].handle);
        signals[i].handle->data = agent;
        uv_signal_start(signals[i].handle, on_signal, signals[i].signum);
    }
    uv_timer_init(agent->loop, &agent->interval);
    uv_timer_init(agent->loop, &agent->soon);
    agent->interval.data = agent->soon.data = agent;
    uv_timer_start(&agent->interval, on_interval, INTERVAL_MS, INTERVAL_MS);
}

static int start_parts(struct agent *agent, struct error *err)
{
    agent->link_ops = (struct link_up_ops){.arg = agent,
                                           .registration = make_register,
                                           .registered = on_registered,
                                           .message = on_message,
                                           .lost = on_lost};
    char scripts[PATH_MAX];
    int rc = devices_open(agent, &agent->devices, err);
    if (!rc)
        rc = agent_tasks_create(agent, &agent->tasks, err);
    if (!rc)
        rc = rendezvous_listen(agent, &agent->rendezvous, err);
    if (!rc) /* before anything is adopted: to be asked whether it is up */
        rc = link_up_create(agent->loop, &agent->way, agent->node, &agent->link_ops, &agent->link, err);
    if (!rc)
        rc = fs_join(scripts, sizeof scripts, err, agent->state_dir, "scripts");
    if (!rc) /* an attempt that is adopted may run its epilog at once */
        rc = scripts_open(scripts, err);
    if (!rc)
        rc = attempts_load(agent, err);
    return rc ? rc : health_open(agent, &agent->health, err);
}

static bool is_busy(const struct agent *agent)
{
    if (devices_busy(agent->devices) || health_busy(agent->health))
        return true;
    for (const struct agent_attempt *a = agent->attempts; a; a = a->next) {
        if (a->busy || a->epilog_runs)
            return true;
    }
    return false;
}

/* Threads and keepers on their way use the attempts; one that a dead file system holds is left to the
 * end of the process. */
static bool wait_for_helpers(struct agent *agent)
{
    int64_t deadline = clock_mono_ns() + CLOSE_MS * NS_PER_MS;
    while (is_busy(agent) && clock_mono_ns() < deadline) {
        uv_run(agent->loop, UV_RUN_NOWAIT);
        poll(NULL, 0, 5);
    }
    return !is_busy(agent);
}

static void close_all(struct agent *agent)
{
    agent->closing = true;
    agent_tasks_stop(agent);
    link_up_close(agent->link);
    agent->link = NULL;
    rendezvous_close(agent->rendezvous);
    agent->rendezvous = NULL;
    uv_handle_t *own[] = {(uv_handle_t *)&agent->interval, (uv_handle_t *)&agent->soon, (uv_handle_t *)&agent->term,
                          (uv_handle_t *)&agent->intr, (uv_handle_t *)&agent->hup};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        uv_close(own[i], NULL);
    if (wait_for_helpers(agent)) {
        attempts_close(agent);
        agent_tasks_close(agent->tasks);
        health_close(agent->health);
        devices_close(agent->devices);
        int64_t deadline = clock_mono_ns() + CLOSE_MS * NS_PER_MS;
        while (uv_run(agent->loop, UV_RUN_NOWAIT) && clock_mono_ns() < deadline)
            poll(NULL, 0, 1);
        uv_loop_close(agent->loop);
    }
    arena_free(&agent->register_arena);
    if (agent->lock_fd >= 0)
        close(agent->lock_fd);
}

/* The socket that the command line names, else the configuration's addresses, else the socket of the configuration, the
 * environment or the default. */
static int find_way(struct agent *agent, const struct agent_setup *setup, struct error *err)
{
    const Boost__AgentConfig *config = setup->config;
    agent->way = (struct link_up_way){
        .addresses = config->controller_address,
        .n_addresses = config->n_controller_address,
        .tls = {.certificate = config->tls_certificate, .key = config->tls_key, .ca = config->tls_ca}};
    if (config->n_controller_address && !setup->controller_socket)
        return ERR_OK;
    agent->way.socket_path = agent->controller_socket;
    return socket_path_find(SOCKET_CONNECT, setup->controller_socket, config->controller_socket,
                            agent->controller_socket, err);
}

int agent_run(const struct agent_setup *setup, struct error *err)
{
    static uv_loop_t loop; /* a thread that never comes back may still look at both */
    static struct agent agent;
    agent = (struct agent){.loop = &loop, .config = setup->config, .lock_fd = -1};
    arena_init(&agent.register_arena, REGISTER_ARENA);
    snprintf(agent.keeper_path, sizeof agent.keeper_path, "%s", setup->keeper_path);
    snprintf(agent.worker_path, sizeof agent.worker_path, "%s", setup->worker_path);
    int rc = identify(&agent, err);
    if (!rc)
        rc = find_way(&agent, setup, err);
    if (!rc)
        rc = make_dirs(&agent, err);
    if (!rc)
        rc = fs_join(agent.obeys_path, sizeof agent.obeys_path, err, agent.state_dir, "controllers");
    agent.way.obeys_path = agent.obeys_path;
    if (!rc)
        rc = take_lock(&agent, err);
    if (!rc)
        rc = attempts_check_names(&agent, err);
    if (rc) {
        if (agent.lock_fd >= 0)
            close(agent.lock_fd);
        return rc;
    }
    log_set_prefix(agent.node);
    uv_loop_init(&loop);
    start_handles(&agent);
    rc = start_parts(&agent, err);
    if (!rc) {
        log_line(LOG_INFO, "boost-agent %s, node %s, %d cores, %d slots, state in %s", boost_version(), agent.node,
                 agent.cores, agent.cpu_slots, agent.state_dir);
        uv_run(&loop, UV_RUN_DEFAULT);
    }
    close_all(&agent);
    return rc;
}
