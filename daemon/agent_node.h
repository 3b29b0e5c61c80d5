/* One boost-agent: its identity, its directories and its parts, wired together.
 *
 *   state_dir/lock               held while an agent runs here
 *   state_dir/attempts/<store>-<job>.<attempt>/   run directories (proto/rankfiles.h)
 *   state_dir/logs/<store>-<job>.<attempt>/       logs of ended ones, under log_keep_bytes
 *   state_dir/controllers        which controllers were obeyed (agent_obeys.h)
 *   state_dir/lost+found/        what could not be read at a start
 *   state_dir/unfit.pb           what prolog or epilog have shown to be wrong with the node
 *   state_dir/rendezvous.sock */
#ifndef BOOST_DAEMON_AGENT_NODE_H
#define BOOST_DAEMON_AGENT_NODE_H

#include <limits.h>
#include <uv.h>

#include "daemon/agent_attempts.h"
#include "daemon/agent_devices.h"
#include "daemon/agent_health.h"
#include "daemon/agent_link_up.h"
#include "proto/base/arena.h"
#include "proto/base/error.h"
#include "proto/config.pb-c.h"
#include "proto/socket_path.h"

struct rendezvous_server;
struct agent_tasks;

struct agent {
    uv_loop_t *loop;
    const Boost__AgentConfig *config;
    char node[65];
    char instance[33];
    char state_dir[PATH_MAX], attempts_dir[PATH_MAX], logs_dir[PATH_MAX];
    char keeper_path[PATH_MAX], worker_path[PATH_MAX];
    char controller_socket[SOCKET_PATH_MAX], rendezvous_path[SOCKET_PATH_MAX];
    int lock_fd;
    int cores, cpu_slots;
    int64_t memory_mib;
    char store_id[17]; /* of the controller, "" before it first took us */
    struct link_up_way way; /* to the controller */
    char obeys_path[PATH_MAX];
    struct link_up_ops link_ops;
    struct link_up *link;
    struct agent_attempt *attempts;
    struct rendezvous_server *rendezvous;
    struct agent_tasks *tasks;
    struct agent_health *health;
    struct agent_devices *devices; /* NULL: this node gives no GPUs away */
    uv_timer_t interval, soon;
    int64_t last_poll_ns;
    bool soon_armed;
    uv_signal_t term, intr, hup;
    struct arena register_arena;
    bool was_registered;
    bool closing;
};

struct agent_setup {
    const Boost__AgentConfig *config; /* the caller's, outlives the agent */
    const char *keeper_path, *worker_path;
    const char *controller_socket; /* of the command line; NULL: configuration, environment, default */
};

/* Takes the state directory (ERR_BUSY: another agent has it, or attempts of another node's name run in it), adopts
 * what runs, connects, and runs until SIGTERM or SIGINT. Ranks are left running. Prints "boost-agent ready node=NAME"
 * when first registered. Once a process; it should then end with _exit, since a thread may hang on a dead file
 * system. */
MUST_USE int agent_run(const struct agent_setup *setup, struct error *err);

/* Sends one message; false: not now. */
bool agent_send(struct agent *agent, Boost__AgentMessage__BodyCase kind, const ProtobufCMessage *body);
/* Looks at every attempt within some milliseconds. */
void agent_poll_soon(struct agent *agent);

#endif
