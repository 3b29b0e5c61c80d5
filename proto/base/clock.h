/* Clocks. Timers and durations use the monotonic one; the wall clock is only
 * ever shown to people, and no machine's clock is compared with another's. */
#ifndef BOOST_PROTO_BASE_CLOCK_H
#define BOOST_PROTO_BASE_CLOCK_H

#include <stddef.h>
#include <stdint.h>

#define NS_PER_MS INT64_C(1000000)
#define NS_PER_S INT64_C(1000000000)

int64_t clock_mono_ns(void); /* CLOCK_MONOTONIC */
int64_t clock_wall_ns(void); /* CLOCK_REALTIME, ns since 1970 */
int64_t clock_boot_ns(void); /* CLOCK_BOOTTIME: since boot, sleep too; nobody sets it */
/* From now to a time of clock_mono_ns(), as poll() wants it: 0 once it is over, INT_MAX at most. */
int clock_left_ms(int64_t deadline_ns);

enum { CLOCK_TEXT = 32 };
/* RFC 3339 in UTC with milliseconds ("2026-11-29T13:02:46.123Z"); returns out. */
char *clock_rfc3339(int64_t wall_ns, char out[CLOCK_TEXT]);

#endif
