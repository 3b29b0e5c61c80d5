/* clock.h */
#include "proto/base/clock.h"

#include <limits.h>
#include <stdio.h>
#include <time.h>

static int64_t read_clock(clockid_t id)
{
    struct timespec ts;
    clock_gettime(id, &ts);
    return (int64_t)ts.tv_sec * NS_PER_S + ts.tv_nsec;
}

int64_t clock_mono_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

int64_t clock_boot_ns(void)
{
    return read_clock(CLOCK_BOOTTIME);
}

int64_t clock_wall_ns(void)
{
    return read_clock(CLOCK_REALTIME);
}

int clock_left_ms(int64_t deadline_ns)
{
    int64_t left = (deadline_ns - clock_mono_ns()) / NS_PER_MS;
    return left <= 0 ? 0 : left < INT_MAX ? (int)left : INT_MAX;
}

char *clock_rfc3339(int64_t wall_ns, char out[CLOCK_TEXT])
{
    time_t seconds = (time_t)(wall_ns / NS_PER_S);
    int millis = (int)(wall_ns % NS_PER_S / NS_PER_MS);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t used = strftime(out, CLOCK_TEXT, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out + used, CLOCK_TEXT - used, ".%03dZ", millis);
    return out;
}
