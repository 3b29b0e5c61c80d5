/* Event files of TensorBoard: scalars over steps. Records as TFRecord frames them (length, masked CRC-32C, bytes, masked
 * CRC-32C), each a message of tensorflow/core/util/event.proto. */
#ifndef BOOST_PROTO_TBEVENTS_H
#define BOOST_PROTO_TBEVENTS_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

struct tbevents {
    int fd; /* -1: closed */
};

enum { TBEVENTS_VALUES = 32 }; /* of one event; more are left out */

/* `<dir>/job-<job><suffix>/events.out.tfevents.<seconds of wall_ns>.<name>`, made with its folders; an existing file of
 * that name is written anew. TensorBoard with --logdir <dir> shows each job as a run. */
MUST_USE int tbevents_open(struct tbevents *t, const char *dir, int64_t job, const char *suffix, const char *name,
                           int64_t wall_ns, struct error *err);
/* What was written of this step and later ones is outdated: an attempt begins there. */
MUST_USE int tbevents_restart(struct tbevents *t, int64_t step, int64_t wall_ns, struct error *err);
/* Values that are not finite are written as they are: TensorBoard shows them as such. After an error the file ends with
 * the event before. */
MUST_USE int tbevents_scalars(struct tbevents *t, int64_t step, int64_t wall_ns, const char *const *names,
                              const double *values, size_t n, struct error *err);
void tbevents_close(struct tbevents *t);

#endif
