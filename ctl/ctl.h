/* What every verb of boostctl shares: the global options, the exit codes, the link.
 *
 * Data goes to stdout, messages to stderr. A verb is a function of (ctl, argc,
 * argv) with argv[0] its own name; it returns an exit code. */
#ifndef BOOST_CTL_CTL_H
#define BOOST_CTL_CTL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/base/arena.h"
#include "proto/base/error.h"
#include "proto/client.h"
#include "proto/rpc.pb-c.h"

enum exit_code {
    EXIT_OK = 0,
    EXIT_JOB_BAD = 1,      /* a waited-for job ended FAILED, TIMEOUT or CANCELLED */
    EXIT_USAGE = 2,
    EXIT_UNREACHABLE = 3,
    EXIT_NOT_FOUND = 4,    /* or ambiguous                                        */
    EXIT_REFUSED = 5,      /* or the output could not be written                  */
    EXIT_INVALID = 6,      /* invalid spec                                        */
    EXIT_TIMED_OUT = 7,
    EXIT_MUST_WAIT = 10,   /* --dry-run: valid, but nothing is free now           */
    EXIT_INTERRUPTED = 130,
};

enum output { OUTPUT_TABLE, OUTPUT_WIDE, OUTPUT_JSON, OUTPUT_JSONL, OUTPUT_NAME };

struct ctl {
    const char *socket_option; /* --socket, or NULL */
    const char *host_option;   /* --host, or NULL; not both */
    const char *tls_option;    /* --tls-dir, or NULL */
    enum output output;
    bool color; /* stdout is a terminal and nobody said no */
    bool tty;   /* stdout is a terminal                    */
    bool quiet; /* no messages but errors                  */
    bool connected;
    bool was_connected;  /* boostd has answered once: a follow then waits for it to come back */
    int64_t deadline_ns; /* monotonic; ctl_call_patient gives up then; 0 = never */
    struct client client;
    uint64_t request_id; /* of the last request, for ctl_more */
};

/* ---- link.c ------------------------------------------------------------------ */

enum { CALL_TIMEOUT_MS = 30000, LONG_POLL_MS = 20000 };

/* An arena for requests and replies of one exchange: a page of 4 MiB unpacks into several times that. */
void ctl_arena(struct arena *arena);
/* Sends and gives the first reply, unpacked into `arena`; NULL with *err set (a Failure of the server
 * becomes *err). Connects when needed. */
Boost__Reply *ctl_call(struct ctl *ctl, Boost__Request *request, struct arena *arena, struct error *err);
/* As ctl_call, for a reply of that kind; *code is the exit code, and the message is printed when it is NULL. */
Boost__Reply *ctl_ask(struct ctl *ctl, Boost__Request *request, Boost__Reply__BodyCase want, struct arena *arena,
                      int *code);
/* As ctl_call, for what may take long: waits until the answer comes or the connection breaks. */
Boost__Reply *ctl_call_long(struct ctl *ctl, Boost__Request *request, struct arena *arena, struct error *err);
/* The next frame of the same reply, after one with `more`. */
Boost__Reply *ctl_more(struct ctl *ctl, struct arena *arena, struct error *err);
/* For follows: like ctl_call, but a controller that answered before and is away now is waited for, with one
 * note on stderr after a second, until ctl->deadline_ns (ERR_TIMEOUT). NULL when interrupted or on any other error. */
Boost__Reply *ctl_call_patient(struct ctl *ctl, Boost__Request *request, struct arena *arena, struct error *err);
/* Installs the SIGINT handler of a follow; ctl_interrupted() says whether it came. */
void ctl_catch_interrupt(void);
bool ctl_interrupted(void);
/* How a follow that got no reply ends: says what an interrupt leaves running, or prints the error. */
int ctl_end_follow(const char *job, const struct error *err);

/* Prints "boostctl: message" and the hint on stderr; returns the exit code of err->code. */
int ctl_fail(const struct error *err);
int ctl_exit_code(int error_code);
/* "boostctl VERB: text" and how to get help; returns EXIT_USAGE. */
int ctl_usage(const char *verb, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* "17.2/3": job, attempt and rank in one word; the last two are optional. `text` is cut into pieces. */
struct ctl_ref {
    const char *job;
    long long attempt; /* 0: not said */
    long long rank;    /* -1: not said */
};
struct ctl_ref ctl_split_ref(char *text);

/* A JobRef in `arena`. */
Boost__JobRef *ctl_ref(struct arena *arena, const char *text);

/* The caller's name, or uid where there is none; static. */
const char *ctl_own_name(void);
/* Each job of a ControlReply gets its line; the first failure decides the exit code. */
int ctl_print_results(struct ctl *ctl, const Boost__ControlReply *r);

struct job_file;
struct option_list;
/* Reads a job file (ctl_files.c) and applies --set; format NULL: by content. jobfile_free() after failure too. */
int ctl_load_job(struct job_file *file, const char *path, const char *format, bool allow_unknown,
                 const struct option_list *set, struct error *err);

/* ---- ctl_status.c: the table of jobs, for top too ---- */
struct table;
struct table *job_table_new(bool wide);
void job_table_row(struct table *t, const Boost__JobSummary *s, bool wide);
void totals_print(FILE *out, const Boost__Totals *t);

/* ---- ctl_ckpt.c, for show too ---- */
bool checkpoint_listed(const Boost__CheckpointInfo *c); /* it is there, or will be */
void checkpoint_table(const struct ctl *ctl, Boost__CheckpointInfo *const *list, size_t n, int indent);

/* ---- verbs -------------------------------------------------------------------- */

int verb_submit(struct ctl *ctl, int argc, char **argv);
int verb_status(struct ctl *ctl, int argc, char **argv);
int verb_show(struct ctl *ctl, int argc, char **argv);
int verb_events(struct ctl *ctl, int argc, char **argv);
int verb_metrics(struct ctl *ctl, int argc, char **argv);
int verb_logs(struct ctl *ctl, int argc, char **argv);
int verb_ckpt(struct ctl *ctl, int argc, char **argv);
int verb_control(struct ctl *ctl, int argc, char **argv); /* cancel hold release checkpoint */
int verb_stacks(struct ctl *ctl, int argc, char **argv);
int verb_restart(struct ctl *ctl, int argc, char **argv);
int verb_update(struct ctl *ctl, int argc, char **argv);
int verb_usage(struct ctl *ctl, int argc, char **argv);
int verb_top(struct ctl *ctl, int argc, char **argv);
int verb_wait(struct ctl *ctl, int argc, char **argv);
int verb_node(struct ctl *ctl, int argc, char **argv);
int verb_validate(struct ctl *ctl, int argc, char **argv);
int verb_plan(struct ctl *ctl, int argc, char **argv);
int verb_convert(struct ctl *ctl, int argc, char **argv); /* encode decode */
int verb_config(struct ctl *ctl, int argc, char **argv);
int verb_completion(struct ctl *ctl, int argc, char **argv);
int verb_ping(struct ctl *ctl, int argc, char **argv);
int verb_version(struct ctl *ctl, int argc, char **argv);

/* submit --follow and --wait, wait --follow: until the job (a JobRef) has ended; returns the exit code. */
int follow_job(struct ctl *ctl, const char *job, bool display);

#endif
