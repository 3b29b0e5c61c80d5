/* nccl_rank.h: connecting.
 *
 * One communicator spans all ranks and is used to make the others only: it is non-blocking, so that connecting ends by
 * our deadline. The groups' communicators are made from it and take calls on the caller's thread: a non-blocking one
 * would start a thread for every call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "worker/comm/nccl_rank.h"

enum { DEVICE_TEXT = 192 };

/* ---- errors ---------------------------------------------------------------------- */

int nccl_say_lost(int rank, struct error *err)
{
    error_set(err, ERR_PEER_LOST, "lost rank %d", rank);
    return error_hint(err, "the cause is in the log of rank %d", rank);
}

int nccl_explain(struct nccl_rank *r, ncclResult_t status, int wait_ms, struct error *err)
{
    int lost = status == ncclUnhandledCudaError ? -1 : peers_blame(r->peers, wait_ms);
    if (lost >= 0)
        return nccl_say_lost(lost, err);
    enum error_code code = status == ncclRemoteError                                       ? ERR_PEER_LOST
                           : status == ncclSystemError || status == ncclUnhandledCudaError ? ERR_DEVICE
                                                                                           : ERR_INTERNAL;
    const char *detail = ncclGetLastError(NULL);
    error_set(err, code, "NCCL: %s%s%s", ncclGetErrorString(status), detail && detail[0] ? ": " : "",
              detail ? detail : "");
    return error_hint(err, "NCCL_DEBUG=WARN in the environment of the agent makes NCCL say more");
}

/* ---- who is on which device -------------------------------------------------------- */

/* What NCCL tells hosts and devices apart by: "<host name> <boot> <bus id>". */
static int identify(char out[DEVICE_TEXT], struct error *err)
{
    char host[65] = "", boot[40] = "", bus[32];
    cudaError_t status = cudaDeviceGetPCIBusId(bus, sizeof bus, 0);
    if (status != cudaSuccess) {
        error_set(err, ERR_DEVICE, "CUDA: which device is it: %s (%s)", cudaGetErrorString(status),
                  cudaGetErrorName(status));
        return error_hint(err, "see what nvidia-smi shows, and CUDA_VISIBLE_DEVICES");
    }
    gethostname(host, sizeof host - 1);
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f) {
        if (fgets(boot, sizeof boot, f))
            boot[strcspn(boot, "\n")] = '\0';
        fclose(f);
    }
    snprintf(out, DEVICE_TEXT, "%s %s %s", host, boot, bus);
    return ERR_OK;
}

/* Puts every rank's identity into `all`; an error names the rank that did not come. */
static int exchange_devices(const struct nccl_rank *r, const struct rendezvous *rv, int64_t deadline_ns,
                            char (*all)[DEVICE_TEXT], struct error *err)
{
    char key[32];
    int rc = identify(all[r->rank], err);
    snprintf(key, sizeof key, "device-%d", r->rank);
    if (!rc)
        rc = rv->set(rv->arg, "world", key, all[r->rank], strlen(all[r->rank]), err);
    for (int i = 0; i < r->world && !rc; i++) {
        struct buffer value;
        if (i == r->rank)
            continue;
        buffer_init(&value, DEVICE_TEXT);
        snprintf(key, sizeof key, "device-%d", i);
        rc = rv->get(rv->arg, "world", key, clock_left_ms(deadline_ns) + 1, &value, err);
        if (rc == ERR_TIMEOUT)
            error_context(err, "rank %d did not come to the rendezvous of group world", i);
        if (!rc)
            snprintf(all[i], DEVICE_TEXT, "%.*s", (int)value.len, (const char *)value.data);
        buffer_free(&value);
    }
    return rc;
}

static bool any_shared(int world, char (*all)[DEVICE_TEXT], int *a, int *b)
{
    for (*a = 0; *a < world; ++*a)
        for (*b = *a + 1; *b < world; ++*b)
            if (!strcmp(all[*a], all[*b]))
                return true;
    return false;
}

/* Up to the device: "<host name> <boot>". */
static bool same_host(const char *a, const char *b)
{
    const char *end = strrchr(a, ' ');
    return end && !strncmp(a, b, (size_t)(end - a) + 1);
}

/* Whether the ranks of a group are. */
static bool on_one_host(const struct comm_place *group, char (*all)[DEVICE_TEXT])
{
    for (int i = 1; i < group->size; i++)
        if (!same_host(all[group->first], all[group->first + i * group->step]))
            return false;
    return true;
}

/* NCCL refuses two ranks on one device of one host. Its variables are read at its first call in the process. */
static void as_if_on_hosts_of_their_own(const struct nccl_rank *r, const char *bind_address, int a, int b)
{
    char id[32], line[256];
    bool loopback = !strncmp(bind_address, "127.", 4) || !strcmp(bind_address, "::1");
    snprintf(id, sizeof id, "boost-rank-%d", r->rank);
    setenv("NCCL_HOSTID", id, 1);
    setenv("NCCL_IB_DISABLE", "1", 0);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    if (loopback)
        setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    snprintf(line, sizeof line,
             "rank %d: ranks %d and %d share a GPU: all ranks talk over sockets, for tests only (NCCL_HOSTID=%s)",
             r->rank, a, b, id);
    r->watch.say(r->watch.arg, line);
}

static int look_at_devices(struct nccl_rank *r, const struct comm_layout *layout, const char *bind_address,
                           const struct rendezvous *rv, int64_t deadline_ns, struct error *err)
{
    int a, b;
    char(*all)[DEVICE_TEXT] = calloc((size_t)r->world, sizeof *all);
    if (!all)
        return error_set(err, ERR_NOMEM, "out of memory");
    int rc = exchange_devices(r, rv, deadline_ns, all, err);
    bool shared = !rc && any_shared(r->world, all, &a, &b);
    if (shared)
        as_if_on_hosts_of_their_own(r, bind_address, a, b);
    struct comm_place tp = comm_place_of(layout, r->rank, GROUP_TP);
    r->tp_on_one_host = !rc && !shared && on_one_host(&tp, all);
    free(all);
    return rc;
}

/* ---- connecting ------------------------------------------------------------------ */

/* Waits until the root communicator is done with what it was last asked for. */
static int settle(struct nccl_rank *r, ncclResult_t status, int64_t deadline_ns, int timeout_ms, const char *group,
                  struct error *err)
{
    while (status == ncclSuccess || status == ncclInProgress) {
        ncclResult_t now, asked = ncclCommGetAsyncError(r->root, &now);
        status = asked == ncclSuccess ? now : asked;
        if (status == ncclSuccess)
            return ERR_OK;
        if (status != ncclInProgress)
            break;
        int lost = peers_blame(r->peers, 1); /* the pause between two looks, too */
        if (lost >= 0)
            return nccl_say_lost(lost, err);
        if (!clock_left_ms(deadline_ns)) {
            error_set(err, ERR_TIMEOUT,
                      "NCCL did not connect the ranks within %d ms, though all of them came to the rendezvous",
                      timeout_ms);
            return error_hint(err,
                              "NCCL_DEBUG=INFO shows the network that it chose; NCCL_SOCKET_IFNAME and NCCL_IB_HCA "
                              "choose another");
        }
    }
    int rc = nccl_explain(r, status, NCCL_BLAME_WAIT_MS, err);
    error_context(err, "connecting group %s", group);
    return rc;
}

static ncclConfig_t config_of(const char *name, int blocking)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    config.commName = name;
    return config;
}

static int connect_root(struct nccl_rank *r, const struct rendezvous *rv, int64_t deadline_ns, int timeout_ms,
                        struct error *err)
{
    static const char key[] = "nccl";
    ncclUniqueId id;
    int rc = ERR_OK;
    if (r->rank == 0) {
        ncclResult_t status = ncclGetUniqueId(&id);
        if (status != ncclSuccess)
            return nccl_explain(r, status, 0, err);
        rc = rv->set(rv->arg, "world", key, &id, sizeof id, err);
    } else {
        struct buffer value;
        buffer_init(&value, 2 * sizeof id);
        rc = rv->get(rv->arg, "world", key, clock_left_ms(deadline_ns) + 1, &value, err);
        if (rc == ERR_TIMEOUT)
            error_context(err, "rank 0 did not come to the rendezvous of group world");
        else if (!rc && value.len != sizeof id)
            rc = error_set(err, ERR_PROTOCOL, "rank 0's NCCL id is %zu bytes long, not %zu", value.len, sizeof id);
        if (!rc)
            memcpy(&id, value.data, sizeof id);
        buffer_free(&value);
    }
    if (rc)
        return rc;
    ncclConfig_t config = config_of("root", 0);
    ncclResult_t status = ncclCommInitRankConfig(&r->root, r->world, id, r->rank, &config);
    if (!r->root) {
        rc = nccl_explain(r, status, NCCL_BLAME_WAIT_MS, err);
        error_context(err, "connecting group world");
        return rc;
    }
    return settle(r, status, deadline_ns, timeout_ms, "world", err);
}

/* Whether the layout has this group, on this rank or on others. */
static bool layout_has(const struct comm_layout *l, enum comm_group g)
{
    switch (g) {
    case GROUP_WORLD:
        return true;
    case GROUP_TP:
        return l->tp > 1;
    case GROUP_PP:
        return l->pp > 1;
    case GROUP_DP:
        return l->dp > 1;
    default:
        return l->ends && l->pp > 1;
    }
}

/* Every rank takes part in every split, in one order. */
static int split_groups(struct nccl_rank *r, const struct comm_layout *layout, int64_t deadline_ns, int timeout_ms,
                        struct error *err)
{
    for (int i = 0; i < GROUP_COUNT; i++) {
        enum comm_group g = (enum comm_group)i;
        struct comm_place place = comm_place_of(layout, r->rank, g);
        const char *name = comm_group_name(g);
        struct member *m = &r->members[g];
        bool mine = place.size > 1;
        int rank = 0, size = 0;
        if (!layout_has(layout, g))
            continue;
        ncclConfig_t config = config_of(name, 1);
        if (g == GROUP_TP)
            config.minCTAs = config.maxCTAs = COMM_PROCESSORS; /* as many are kept free for it (block.c) */
        ncclResult_t status =
            ncclCommSplit(r->root, mine ? place.first : NCCL_SPLIT_NOCOLOR, place.rank, &m->comm, &config);
        int rc = settle(r, status, deadline_ns, timeout_ms, name, err);
        if (rc)
            return rc;
        if (mine && (!m->comm || ncclCommUserRank(m->comm, &rank) || ncclCommCount(m->comm, &size) ||
                     rank != place.rank || size != place.size))
            return error_set(err, ERR_INTERNAL, "NCCL made this rank %d of %d in group %s, not %d of %d", rank, size,
                             name, place.rank, place.size);
    }
    return ERR_OK;
}

int nccl_connect(struct nccl_rank *r, const struct comm_layout *layout, const char *bind_address,
                 const struct rendezvous *rv, int timeout_ms, struct error *err)
{
    int64_t deadline = clock_mono_ns() + timeout_ms * NS_PER_MS;
    int rc = peers_connect(r->rank, r->world, bind_address, rv, timeout_ms, &r->peers, err);
    if (rc)
        error_context(err, "connecting group world");
    else
        rc = look_at_devices(r, layout, bind_address, rv, deadline, err);
    if (!rc)
        rc = connect_root(r, rv, deadline, timeout_ms, err);
    if (!rc)
        rc = split_groups(r, layout, deadline, timeout_ms, err);
    return rc;
}
