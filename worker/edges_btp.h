/* The ends of the network under BTP, for the strategy's table in block_btp.c. */
#ifndef BOOST_WORKER_EDGES_BTP_H
#define BOOST_WORKER_EDGES_BTP_H

#include "worker/engine_internal.h"

int btp_embed_forward(struct engine *e, struct error *err);
int btp_embed_backward(struct engine *e, struct error *err);
int btp_head_forward(struct engine *e, struct error *err);
int btp_loss(struct engine *e, double *sum, bool gradient, struct error *err);
int btp_head_backward(struct engine *e, struct error *err);

#endif
