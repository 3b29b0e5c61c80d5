/* Certificates of nodes in any number, of the CA that deploy/make-certs.sh has made, without a process for each: they
 * share one key and live in memory but for the moment in which they are read. One thread. */
#ifndef BOOST_TESTS_BENCH_NODE_CERTS_H
#define BOOST_TESTS_BENCH_NODE_CERTS_H

#include "proto/base/error.h"
#include "proto/tls.h"

/* Reads ca.crt and ca.key of the directory and makes the key. For the life of the process. */
MUST_USE int node_certs_open(const char *dir, struct error *err);
/* A client's context as the agent of `node`. Writes node-bench.{crt,key} into the directory. */
MUST_USE int node_context(const char *dir, const char *node, struct tls_context **out, struct error *err);

#endif
