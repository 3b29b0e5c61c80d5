/* Standard input, output and error, first thing in every main(). */
#ifndef BOOST_PROTO_BASE_STREAMS_H
#define BOOST_PROTO_BASE_STREAMS_H

#include "proto/base/error.h"

/* Those that are closed become /dev/null, also for the programs that this one runs: else the next file or socket that
 * is opened takes the number, and what is printed ends in it. Before anything is opened; the main thread. An error when
 * there is no /dev/null. */
MUST_USE int streams_hold(struct error *err);

#endif
