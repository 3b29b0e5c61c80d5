/* manifest.json, which makes a directory of shards a checkpoint: what the agent writes, and it and the worker read. */
#ifndef BOOST_PROTO_MANIFEST_H
#define BOOST_PROTO_MANIFEST_H

#define MANIFEST_NAME   "manifest.json"
#define MANIFEST_SCHEMA "boost.checkpoint/1"

/* Bytes of one of 65536 shards. Parsed it takes 30 times that of the process. */
enum { MANIFEST_MAX = 16 << 20 };

#endif
