/* Configuration of boostd and boost-agent: protobuf text of BoostdConfig and
 * AgentConfig (proto/config.proto), then `--set field=value` over it, then ranges.
 * Blocking file access; boot only. */
#ifndef BOOST_PROTO_CONFIG_H
#define BOOST_PROTO_CONFIG_H

#include <stddef.h>

#include "proto/base/arena.h"
#include "proto/base/error.h"
#include "proto/config.pb-c.h"

/* All defaults are explicit in the result, so its fields can be read without asking for presence.
 * path NULL: `fallback` if that file exists, else only defaults. `sets`: n assignments "field=value" in the text
 * format's syntax (strings need no quotes). What it makes lives in `a`.
 * ERR_INVALID: path is given and cannot be read, syntax, unknown field, out of range. */
MUST_USE int config_load_boostd(const char *path, const char *fallback, const char *const *sets, size_t n,
                                struct arena *a, Boost__BoostdConfig **out, struct error *err);
MUST_USE int config_load_agent(const char *path, const char *fallback, const char *const *sets, size_t n,
                               struct arena *a, Boost__AgentConfig **out, struct error *err);

#define CONFIG_BOOSTD_PATH "/etc/boost/boostd.conf"
#define CONFIG_AGENT_PATH  "/etc/boost/agent.conf"

#endif
