/* Which GPUs an attempt gets, as far as NVLink goes: those of one group where one has enough, the smallest that does,
 * so that larger ones stay whole; else whole groups, the largest first, so that neighbouring ranks are joined. Pure. */
#ifndef BOOST_DAEMON_AGENT_CHOOSE_H
#define BOOST_DAEMON_AGENT_CHOOSE_H

/* Of n GPUs: the group that NVLink joins each with (-1: none; of all -1 nothing is known), and how many ranks each can
 * still take. Writes the order in which `wanted` ranks are to be given to them, a GPU's number once for each rank;
 * returns how many, fewer than wanted when there are no more. */
int choose_gpus(const int *group, const int *room, int n, int wanted, int *order);

#endif
