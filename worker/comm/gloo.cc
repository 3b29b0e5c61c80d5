/* GLOO: the collectives between processes, a thin shim over the Gloo library (TCP).
 *
 * Three things are added to Gloo:
 *   - one algorithm: the ring, so that the order of additions is a function of the
 *     group's size alone and runs repeat bit for bit;
 *   - a reduce-scatter on send and receive, since the library's own has no deadline;
 *   - the name of the rank that is gone. Gloo knows only addresses, and a rank that
 *     fails because another one died closes its connections too. So a rank that
 *     notices a loss tells the others which rank it was before it leaves ("notice"),
 *     and a rank that sees several connections closed blames those that left without
 *     a notice.
 * No C++ exception leaves this file. */
extern "C" {
#include "worker/comm/comm.h"
}

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

using milliseconds = std::chrono::milliseconds;
using UnboundPtr = std::unique_ptr<gloo::transport::UnboundBuffer>;

/* Slots of our own messages; Gloo's collectives set the top byte of theirs. */
constexpr uint64_t SLOT_NOTICE = 1;
constexpr uint64_t SLOT_PROBE = 2;
constexpr uint64_t SLOT_REDUCE_SCATTER = 3;
constexpr milliseconds NOTICE_WAIT{200};

/* An error that crosses Gloo's frames. */
struct Failure : public std::exception {
    struct error error;
    explicit Failure(const struct error &e) : error(e) {}
    const char *what() const noexcept override { return error.message; }
};

/* Gloo's store over the rendezvous of one group; its keys are the group's rank numbers. */
class GroupStore : public gloo::rendezvous::Store {
public:
    GroupStore(const struct rendezvous *rv, std::string group, int base, std::chrono::steady_clock::time_point deadline)
        : rv_(rv), group_(std::move(group)), base_(base), deadline_(deadline)
    {
    }
    void set(const std::string &key, const std::vector<char> &data) override
    {
        struct error err = {};
        if (data.size() > LIMIT_KV_VALUE) {
            error_set(&err, ERR_UNSUPPORTED, "the address list of group %s takes %zu bytes, the rendezvous carries %d",
                      group_.c_str(), data.size(), (int)LIMIT_KV_VALUE);
            throw Failure(err);
        }
        if (rv_->set(rv_->arg, group_.c_str(), key.c_str(), data.data(), data.size(), &err))
            throw Failure(err);
    }
    std::vector<char> get(const std::string &key) override
    {
        auto left = std::chrono::duration_cast<milliseconds>(deadline_ - std::chrono::steady_clock::now()).count();
        struct buffer value;
        buffer_init(&value, LIMIT_KV_VALUE);
        struct error err = {};
        int rc = rv_->get(rv_->arg, group_.c_str(), key.c_str(), (int)std::max<long long>(left, 1), &value, &err);
        std::vector<char> out(value.data, value.data + value.len);
        buffer_free(&value);
        if (!rc)
            return out;
        if (rc == ERR_TIMEOUT)
            error_context(&err, "rank %ld did not come to the rendezvous of group %s",
                          base_ + strtol(key.c_str(), nullptr, 10), group_.c_str());
        throw Failure(err);
    }
    /* get() waits by itself. */
    void wait(const std::vector<std::string> &) override {}
    void wait(const std::vector<std::string> &, const milliseconds &) override {}

private:
    const struct rendezvous *rv_;
    std::string group_;
    int base_;
    std::chrono::steady_clock::time_point deadline_;
};

/* What the groups of one rank share: the world's connections, over which notices go. */
struct Rank {
    std::shared_ptr<gloo::rendezvous::Context> world;
    std::vector<int32_t> notice;       /* [world] the rank that rank i says is lost */
    std::vector<UnboundPtr> notice_in; /* [world] posted receives */
    milliseconds op_timeout;
};

struct Group {
    std::shared_ptr<Rank> rank;
    std::shared_ptr<gloo::rendezvous::Context> context;
    int base; /* world rank of the group's rank 0; members are consecutive */
    std::vector<char> scratch;
    bool dead = false;
};

/* ---- reductions ------------------------------------------------------------ */

float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

uint16_t to_bf16(float f)
{
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) /* stay a NaN */
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

template <typename T> void sum(void *out, const void *a, const void *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        static_cast<T *>(out)[i] = static_cast<const T *>(a)[i] + static_cast<const T *>(b)[i];
}

/* A NaN wins: a maximum must not hide that a rank's logits are broken. */
template <typename T> void max(void *out, const void *a, const void *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        T x = static_cast<const T *>(a)[i], y = static_cast<const T *>(b)[i];
        static_cast<T *>(out)[i] = x > y || x != x ? x : y;
    }
}

void sum_bf16(void *out, const void *a, const void *b, size_t n)
{
    auto x = static_cast<const uint16_t *>(a), y = static_cast<const uint16_t *>(b);
    for (size_t i = 0; i < n; i++)
        static_cast<uint16_t *>(out)[i] = to_bf16(from_bf16(x[i]) + from_bf16(y[i]));
}

void max_bf16(void *out, const void *a, const void *b, size_t n)
{
    auto x = static_cast<const uint16_t *>(a), y = static_cast<const uint16_t *>(b);
    for (size_t i = 0; i < n; i++) {
        float u = from_bf16(x[i]), v = from_bf16(y[i]);
        static_cast<uint16_t *>(out)[i] = u > v || u != u ? x[i] : y[i];
    }
}

using Reduction = void (*)(void *, const void *, const void *, size_t);
/* [op][dtype] */
const Reduction reductions[2][DTYPE_COUNT] = {
    {sum<float>, sum<double>, sum_bf16, sum<int32_t>},
    {max<float>, max<double>, max_bf16, max<int32_t>},
};

/* ---- errors ---------------------------------------------------------------- */

bool is_open(int peer, gloo::transport::UnboundBuffer &probe)
{
    try {
        probe.recv(peer, SLOT_PROBE);
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

/* The rank that `from` said is lost, or -1 when it left without a word. */
int notice_from(Rank &rank, int from)
{
    try {
        if (rank.notice_in[from] && rank.notice_in[from]->waitRecv(NOTICE_WAIT))
            return rank.notice[from];
    } catch (const std::exception &) {
    }
    return -1;
}

void tell_others(Rank &rank, int32_t lost, const std::set<int> &gone)
{
    std::vector<UnboundPtr> sent;
    for (int i = 0; i < rank.world->size; i++) {
        if (i == rank.world->rank || gone.count(i))
            continue;
        try {
            sent.push_back(rank.world->createUnboundBuffer(&lost, sizeof lost));
            sent.back()->send(i, SLOT_NOTICE);
        } catch (const std::exception &) {
            sent.back().reset();
        }
    }
    for (auto &buffer : sent) {
        try {
            if (buffer)
                buffer->waitSend(NOTICE_WAIT);
        } catch (const std::exception &) {
        }
    }
}

/* World ranks whose connections are closed, by the group's and the world's own. */
std::set<int> closed_peers(Group &g)
{
    std::set<int> gone;
    int32_t nothing = 0;
    for (int pass = 0; pass < 2; pass++) {
        gloo::Context &context = pass ? *g.rank->world : *g.context;
        int base = pass ? 0 : g.base;
        auto probe = context.createUnboundBuffer(&nothing, sizeof nothing);
        for (int i = 0; i < context.size; i++)
            if (i != context.rank && !is_open(i, *probe))
                gone.insert(base + i);
    }
    return gone;
}

/* Turns what Gloo threw inside an operation into an error that names the rank. */
int explain(struct comm *c, Group &g, const char *text, bool timed_out, struct error *err)
{
    g.dead = true;
    int left = g.base + (c->rank + c->size - 1) % c->size;
    if (timed_out) {
        error_set(err, ERR_TIMEOUT, "no answer within %lld ms; waiting for rank %d or for a rank that it waits for",
                  (long long)g.rank->op_timeout.count(), left);
        return error_hint(err, "look at the status of rank %d: it may be stopped, swapping or cut off", left);
    }
    std::set<int> gone = closed_peers(g), guilty;
    int told = -1;
    for (int i : gone) {
        int lost = notice_from(*g.rank, i);
        if (lost < 0)
            guilty.insert(i);
        else
            told = lost;
    }
    if (guilty.empty() && told >= 0)
        guilty.insert(told);
    if (guilty.empty())
        return error_set(err, ERR_PEER_LOST, "lost the connection to another rank: %s", text);
    tell_others(*g.rank, *guilty.begin(), gone);
    std::string names;
    for (int i : guilty)
        names += (names.empty() ? "" : ", ") + std::to_string(i);
    error_set(err, ERR_PEER_LOST, "lost rank %s", names.c_str());
    return error_hint(err, "the cause is in the log of rank %d", *guilty.begin());
}

/* Runs `body` and keeps every exception inside. */
template <typename Body> int guarded(struct comm *c, struct error *err, Body body)
{
    Group &g = *static_cast<Group *>(c->state);
    if (g.dead)
        return error_set(err, ERR_PEER_LOST, "the group is dead after an earlier error");
    auto start = std::chrono::steady_clock::now();
    try {
        body(g);
        return ERR_OK;
    } catch (const std::bad_alloc &) {
        g.dead = true;
        return error_set(err, ERR_NOMEM, "out of memory in a collective");
    } catch (const std::exception &e) {
        try {
            bool timed_out = std::chrono::steady_clock::now() - start >= g.rank->op_timeout;
            return explain(c, g, e.what(), timed_out, err);
        } catch (const std::exception &second) {
            return error_set(err, ERR_PEER_LOST, "%s", second.what());
        }
    }
}

/* ---- operations ------------------------------------------------------------ */

template <typename T>
void all_reduce_typed(Group &g, void *data, size_t count, enum comm_op op, enum dtype dtype)
{
    gloo::AllreduceOptions options(g.context);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setOutput(static_cast<T *>(data), count);
    options.setReduceFunction(reductions[op][dtype]);
    options.setTimeout(g.rank->op_timeout);
    gloo::allreduce(options);
}

void all_reduce_one(Group &g, void *data, size_t count, enum comm_op op, enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_F64:
        return all_reduce_typed<double>(g, data, count, op, dtype);
    case DTYPE_BF16:
        return all_reduce_typed<uint16_t>(g, data, count, op, dtype);
    case DTYPE_I32:
        return all_reduce_typed<int32_t>(g, data, count, op, dtype);
    default:
        return all_reduce_typed<float>(g, data, count, op, dtype);
    }
}

/* Segments that lie one behind the other in memory go as one message. */
int gloo_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n, enum comm_op op,
                    struct error *err)
{
    (void)ks;
    return guarded(c, err, [&](Group &g) {
        for (int i = 0, next; i < n; i = next) {
            char *end = static_cast<char *>(segments[i].data);
            int64_t count = 0;
            for (next = i; next < n && segments[next].dtype == segments[i].dtype && segments[next].data == end; next++) {
                count += segments[next].count;
                end += (size_t)segments[next].count * dtype_size(segments[i].dtype);
            }
            if (count)
                all_reduce_one(g, segments[i].data, (size_t)count, op, segments[i].dtype);
        }
    });
}

/* Ring: in step k a rank passes on the partial sum of chunk rank-k-1 and receives that of
 * chunk rank-k-2, so that after size-1 steps it holds the whole sum of its own chunk. */
int gloo_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk, enum dtype dtype,
                        struct error *err)
{
    (void)ks;
    return guarded(c, err, [&](Group &g) {
        size_t bytes = (size_t)chunk * dtype_size(dtype);
        if (!bytes)
            return;
        if (g.scratch.size() < bytes)
            g.scratch.resize(bytes);
        int right = (c->rank + 1) % c->size, left = (c->rank + c->size - 1) % c->size;
        auto all = g.context->createUnboundBuffer(data, bytes * (size_t)c->size);
        auto received = g.context->createUnboundBuffer(g.scratch.data(), bytes);
        for (int k = 0; k + 1 < c->size; k++) {
            size_t give = (size_t)((c->rank - k - 1 + 2 * c->size) % c->size) * bytes;
            size_t take = (size_t)((c->rank - k - 2 + 2 * c->size) % c->size) * bytes;
            received->recv(left, SLOT_REDUCE_SCATTER, 0, bytes);
            all->send(right, SLOT_REDUCE_SCATTER, give, bytes);
            received->waitRecv(g.rank->op_timeout);
            char *mine = static_cast<char *>(data) + take;
            reductions[COMM_SUM][dtype](mine, g.scratch.data(), mine, (size_t)chunk);
            all->waitSend(g.rank->op_timeout);
        }
        std::memmove(out, static_cast<char *>(data) + (size_t)c->rank * bytes, bytes);
    });
}

int gloo_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk, enum dtype dtype,
                    struct error *err)
{
    (void)ks;
    return guarded(c, err, [&](Group &g) {
        size_t bytes = (size_t)chunk * dtype_size(dtype);
        if (!bytes)
            return;
        gloo::AllgatherOptions options(g.context);
        options.setInput(static_cast<char *>(const_cast<void *>(in)), bytes);
        options.setOutput(static_cast<char *>(out), bytes * (size_t)c->size);
        options.setTimeout(g.rank->op_timeout);
        gloo::allgather(options);
    });
}

void gloo_destroy(struct comm *c)
{
    delete static_cast<Group *>(c->state);
    c->state = nullptr;
}

const struct comm_backend gloo_backend = {
    "gloo", gloo_all_reduce, gloo_reduce_scatter, gloo_all_gather, gloo_destroy,
};

/* ---- connecting ------------------------------------------------------------ */

std::shared_ptr<gloo::rendezvous::Context> connect(int rank, int size, const std::string &group, int base,
                                                   const struct rendezvous *rv,
                                                   std::shared_ptr<gloo::transport::Device> &device,
                                                   milliseconds timeout)
{
    GroupStore store(rv, group, base, std::chrono::steady_clock::now() + timeout);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    /* Gloo waits five times this long for a connection; the store has its own deadline. */
    context->setTimeout(std::max(milliseconds(1), timeout / 5));
    context->connectFullMesh(store, device);
    return context;
}

void post_notices(Rank &rank)
{
    int n = rank.world->size;
    rank.notice.assign((size_t)n, -1);
    rank.notice_in.resize((size_t)n);
    for (int i = 0; i < n; i++) {
        if (i == rank.world->rank)
            continue;
        rank.notice_in[i] = rank.world->createUnboundBuffer(&rank.notice[i], sizeof rank.notice[i]);
        rank.notice_in[i]->recv(i, SLOT_NOTICE);
    }
}

void fill(struct comm *c, struct comms *all, enum comm_group group, int rank, int size, int world_rank, Group *state)
{
    c->backend = &gloo_backend;
    c->group = group;
    c->rank = rank;
    c->size = size;
    c->world_rank = world_rank;
    c->counters = &all->counters;
    c->seconds = &all->seconds;
    c->state = state;
}

} // namespace

int gloo_comms_create(int rank, int world, int tp, const char *bind_address, const struct rendezvous *rv,
                      int connect_timeout_ms, int op_timeout_ms, struct comms *out, struct error *err)
{
    std::memset(out, 0, sizeof *out);
    try {
        gloo::transport::tcp::attr attributes;
        attributes.hostname = bind_address;
        auto device = gloo::transport::tcp::CreateDevice(attributes);
        milliseconds timeout(connect_timeout_ms);
        auto shared = std::make_shared<Rank>();
        shared->op_timeout = milliseconds(op_timeout_ms);
        shared->world = connect(rank, world, "world", 0, rv, device, timeout);
        post_notices(*shared);
        auto all = std::make_unique<Group>();
        all->rank = shared;
        all->context = shared->world;
        all->base = 0;
        auto slice = std::make_unique<Group>();
        slice->rank = shared;
        slice->base = rank / tp * tp;
        slice->context = tp == world ? shared->world
                                     : connect(rank % tp, tp, "tp" + std::to_string(rank / tp), slice->base, rv, device,
                                               timeout);
        fill(&out->world, out, GROUP_WORLD, rank, world, rank, all.release());
        fill(&out->tp, out, GROUP_TP, rank % tp, tp, rank, slice.release());
        return ERR_OK;
    } catch (const Failure &failure) {
        if (err)
            *err = failure.error;
        return failure.error.code;
    } catch (const std::bad_alloc &) {
        return error_set(err, ERR_NOMEM, "out of memory while connecting the ranks");
    } catch (const std::exception &e) {
        error_set(err, ERR_PEER_LOST, "cannot connect the ranks over %s: %s", bind_address, e.what());
        return error_hint(err, "the data address of the agent must be an address of this machine that the other nodes reach");
    }
}
