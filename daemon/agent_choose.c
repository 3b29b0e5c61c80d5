/* agent_choose.h */
#include "daemon/agent_choose.h"

#include <stdbool.h>

/* Where nothing is known all are one group; else one without a group is its own. */
static int group_of(const int *group, int i, bool known, int n)
{
    return !known ? 0 : group[i] >= 0 ? group[i] : n + i;
}

int choose_gpus(const int *group, const int *room, int n, int wanted, int *order)
{
    bool known = false;
    int given = 0;
    for (int i = 0; i < n; i++)
        known = known || group[i] >= 0;
    while (given < wanted) {
        int best = -1, best_room = 0, left = wanted - given;
        for (int i = 0; i < n; i++) {
            int total = 0, g = group_of(group, i, known, n);
            bool taken = false;
            for (int k = 0; k < given; k++)
                taken = taken || group_of(group, order[k], known, n) == g;
            for (int k = 0; k < n && !taken; k++)
                total += group_of(group, k, known, n) == g ? room[k] : 0;
            bool fits = total >= left, best_fits = best_room >= left;
            if (total > 0 && (best < 0 || (fits && (!best_fits || total < best_room)) ||
                              (!fits && !best_fits && total > best_room))) {
                best = g;
                best_room = total;
            }
        }
        if (best < 0)
            break;
        for (int i = 0; i < n; i++)
            for (int k = 0; group_of(group, i, known, n) == best && k < room[i] && given < wanted; k++)
                order[given++] = i;
    }
    return given;
}
