/* Log lines of the daemons: "2026-11-29T13:02:46.123Z info  text", one write() each
 * to standard error, so that lines of several processes never mix. Any thread. */
#ifndef BOOST_DAEMON_LOG_H
#define BOOST_DAEMON_LOG_H

#include <stdbool.h>

#include "proto/base/error.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

/* "debug", "info", "warn", "error"; ERR_INVALID naming them. */
MUST_USE int log_level_by_name(const char *name, enum log_level *out, struct error *err);
/* Lines below the level are dropped; info at first. */
void log_set_level(enum log_level level);
/* A short word before each text ("agent gpu01", "keeper 17.2"), copied; "" = none. */
void log_set_prefix(const char *prefix);
bool log_enabled(enum log_level level);
/* Control bytes of the text are replaced, so that no peer can forge a line. At most 2 KiB. */
void log_line(enum log_level level, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* "text: message (hint)" of an error. */
void log_error(enum log_level level, const struct error *err, const char *fmt, ...) PRINTF_LIKE(3, 4);

#endif
