/* GPUs in a table, of nodes or of a job. */
#ifndef BOOST_CTL_CTL_NODE_H
#define BOOST_CTL_CTL_NODE_H

#include "ctl/ctl.h"

void device_table(const struct ctl *ctl, Boost__DeviceInfo *const *list, size_t n, int indent);

#endif
