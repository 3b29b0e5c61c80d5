/* What this build is; shown by `version`, `ping` and in every hello. */
#ifndef BOOST_PROTO_VERSION_H
#define BOOST_PROTO_VERSION_H

const char *boost_version(void);  /* "0.1.0" */
const char *boost_build_id(void); /* commit, 12 hex digits, or "unknown" */

#endif
