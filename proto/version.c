/* version.h; the two macros come from the Makefile for this file alone. */
#include "proto/version.h"

const char *boost_version(void)
{
    return BOOST_VERSION;
}

const char *boost_build_id(void)
{
    return BOOST_COMMIT;
}
