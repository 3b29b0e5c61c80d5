/* What can be wrong with a node, check by check. Any thread; whatever blocks (the site's script) has a time limit. */
#ifndef BOOST_DAEMON_AGENT_CHECKS_H
#define BOOST_DAEMON_AGENT_CHECKS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/agent_leftover.h"
#include "proto/base/error.h"
#include "proto/config.pb-c.h"
#include "proto/worker.pb-c.h"

enum { FINDINGS_MAX = 12, FINDING_TEXT = 512 };
/* A check that failed, as FailedCheck tells it. */
struct finding {
    char check[16], text[FINDING_TEXT];
};
struct findings {
    struct finding items[FINDINGS_MAX]; /* what does not fit is left out */
    int n;
};

/* Adds, or replaces the one of the same check. */
void finding_set(struct findings *list, const char *check, const char *fmt, ...) PRINTF_LIKE(3, 4);
void finding_clear(struct findings *list, const char *check);
/* "memory: ...; script: ..." */
void findings_text(const struct findings *list, char *out, size_t cap);

/* Memory that can be had, and whether the node's address can be bound. */
void checks_at_once(const Boost__AgentConfig *config, struct findings *out);
/* The site's script; `start` is the attempt that is to begin, or NULL. */
void check_script(const Boost__AgentConfig *config, const char *node, const Boost__AttemptStart *start,
                  struct findings *out);
/* Kills what earlier attempts of this job have left here as its user, waiting some seconds (D3, D7, D44). */
void check_earlier_attempts(const char *attempts_dir, const Boost__AttemptStart *start, struct findings *out);
/* ERR_BUSY: less memory can be had than the attempt's ranks ask for. */
MUST_USE int check_room(const Boost__AttemptStart *start, struct error *err);

/* Runs a script of the site, `which` being "health", "prolog" or "epilog", with what it is to know of the attempt
 * (NULL: none) in its environment (boost-agent(8)). Errors as script_run(). */
MUST_USE int site_script(const char *which, const char *path, int timeout_ms, int cancel_fd, const char *node,
                         const Boost__AttemptStart *start, struct error *err);

#endif
