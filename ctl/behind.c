/* behind.h */
#include "ctl/behind.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static const Boost__CollectiveInfo *of_group(const Boost__RankStacks *r, const char *group)
{
    for (size_t i = 0; i < r->n_collectives; i++)
        if (r->collectives[i]->group && !strcmp(r->collectives[i]->group, group))
            return r->collectives[i];
    return NULL;
}

/* Which of the groups of that name the rank is in: ranks of the same have the same number. */
static int instance(const Boost__StacksReply *l, const char *group, int rank)
{
    int tp = l->tp > 0 ? l->tp : 1, dp = l->dp > 0 ? l->dp : 1;
    if (!strcmp(group, "tp"))
        return rank / tp;
    if (!strcmp(group, "dp"))
        return rank / (tp * dp) * tp + rank % tp;
    if (!strcmp(group, "pp") || !strcmp(group, "ends"))
        return rank % (tp * dp);
    return 0;
}

/* First and last stage share their tables, the others are not in it. */
static bool member(const Boost__StacksReply *l, const char *group, int rank)
{
    int stage = (l->tp > 0 ? l->tp : 1) * (l->dp > 0 ? l->dp : 1), last = (l->pp > 0 ? l->pp : 1) - 1;
    return strcmp(group, "ends") != 0 || rank / stage == 0 || rank / stage == last;
}

static bool waits(const Boost__CollectiveInfo *c)
{
    return c && c->where != BOOST__COLLECTIVE_INFO__WHERE__LEFT;
}

/* In a call that it has certainly not left. */
static bool inside_some(const Boost__RankStacks *r)
{
    for (size_t i = 0; i < r->n_collectives; i++)
        if (r->collectives[i]->where == BOOST__COLLECTIVE_INFO__WHERE__INSIDE)
            return true;
    return false;
}

static bool known(const Boost__RankStacks *r)
{
    return r->phase && *r->phase;
}

/* The group of `of`: the call that its foremost members wait in, NULL when nobody waits or somebody gets further. */
static const Boost__CollectiveInfo *foremost(const Boost__RankStacks *const *ranks, size_t n,
                                             const Boost__StacksReply *l, const char *group, int of)
{
    const Boost__CollectiveInfo *first = NULL;
    for (size_t i = 0; i < n; i++) {
        if (!known(ranks[i]) || !member(l, group, ranks[i]->rank) || instance(l, group, ranks[i]->rank) != of)
            continue;
        const Boost__CollectiveInfo *c = of_group(ranks[i], group);
        if (ranks[i]->moved)
            return NULL;
        if (c && (!first || c->seq > first->seq || (c->seq == first->seq && waits(c) && !waits(first))))
            first = c;
    }
    return waits(first) ? first : NULL;
}

static bool fill(struct behind *b, const Boost__RankStacks *const *ranks, size_t n, const Boost__StacksReply *l,
                 const char *group)
{
    int of = instance(l, group, b->rank->rank);
    b->waiting = calloc(n, sizeof *b->waiting);
    for (size_t i = 0; b->waiting && i < n; i++) {
        const Boost__CollectiveInfo *c = of_group(ranks[i], group);
        if (instance(l, group, ranks[i]->rank) == of && waits(c) && c->seq == b->waits_in->seq)
            b->waiting[b->n_waiting++] = ranks[i];
    }
    return b->waiting != NULL;
}

size_t behind_find(const Boost__RankStacks *const *ranks, size_t n, const Boost__StacksReply *layout,
                   struct behind **out)
{
    static const char *const groups[] = {"tp", "pp", "dp", "ends", "world"}; /* the narrower names it better */
    size_t found = 0;
    struct behind *list = calloc(n ? n : 1, sizeof *list);
    for (size_t i = 0; list && i < n; i++) {
        const Boost__RankStacks *r = ranks[i];
        for (size_t g = 0; known(r) && !inside_some(r) && g < sizeof groups / sizeof *groups; g++) {
            if (!member(layout, groups[g], r->rank))
                continue;
            const Boost__CollectiveInfo *mine = of_group(r, groups[g]);
            const Boost__CollectiveInfo *first =
                foremost(ranks, n, layout, groups[g], instance(layout, groups[g], r->rank));
            if (!first || (mine && mine->seq >= first->seq))
                continue;
            list[found] = (struct behind){
                .rank = r, .group = groups[g], .calls = mine ? mine->seq : 0, .waits_in = first};
            if (!fill(&list[found++], ranks, n, layout, groups[g])) {
                behind_free(list, found);
                return (size_t)-1;
            }
            break;
        }
    }
    *out = list;
    return list ? found : (size_t)-1;
}

void behind_free(struct behind *list, size_t n)
{
    for (size_t i = 0; list && i < n; i++)
        free(list[i].waiting);
    free(list);
}
