/* The device beside a measurement: SM clock and power, sampled by a thread through NVML, and memory. */
#ifndef BOOST_TESTS_BENCH_DEVICE_LOG_H
#define BOOST_TESTS_BENCH_DEVICE_LOG_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"

struct device_log {
    struct nvml *nvml;
    pthread_t thread;
    bool running;
    int stop;  /* atomic */
    int64_t n; /* samples; the rest is NaN where there are none */
    double mhz, mhz_min, mhz_max, watts, watts_max;
};
/* Of the device that the process sees first. Where NVML or a device is missing nothing is sampled. */
void device_log_begin(struct device_log *log);
void device_log_end(struct device_log *log); /* means, least and most */

/* Bytes free on the calling thread's device; ERR_DEVICE before a stream was made, and without a driver. */
MUST_USE int device_free_bytes(int64_t *bytes, struct error *err);

#endif
