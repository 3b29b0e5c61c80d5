/* GLOO: the collectives between processes, a thin shim over the Gloo library (TCP).
 *
 * Gloo connects the ranks and moves messages; the rings are built here, on its send and
 * receive in synchronous mode (the rank's own thread reads and writes the sockets), because
 * its own collectives and its event loop lack what is promised or needed:
 *   - an end when a rank dies: in the event loop a message that is half received, or queued
 *     to be sent, when its connection breaks is never failed (tcp::Pair::signalException),
 *     so that an all-reduce would wait for its whole deadline; its reduce-scatter has none;
 *   - the cores: the loop polls in circles while another thread holds a connection, which on
 *     a full machine costs more than the transfer;
 *   - the name of the rank that is gone (worker/comm/peers.h); Gloo knows addresses only;
 *   - one order of additions, a function of the group's size alone, so that runs repeat bit
 *     for bit.
 * No C++ exception leaves this file. */
extern "C" {
#include "proto/base/bf16.h"
#include "worker/comm/comm.h"
#include "worker/comm/peers.h"
}

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace
{

using milliseconds = std::chrono::milliseconds;

constexpr int SLOT = 1; /* messages of a pair of ranks keep their order */
/* How long to wait, after an error, for the news of who is gone. */
constexpr int BLAME_WAIT_MS = 1000;
/* Two ranks swap messages in pieces of this size, so that a piece is added up while it is in the cache. */
constexpr size_t PIECE = 512 << 10;

/* An error that crosses Gloo's frames. */
struct Failure : public std::exception {
    struct error error;
    explicit Failure(const struct error &e) : error(e)
    {
    }
    const char *what() const noexcept override
    {
        return error.message;
    }
};

/* Gloo's store over the rendezvous of one group; its keys are the group's rank numbers. */
class GroupStore : public gloo::rendezvous::Store
{
  public:
    GroupStore(const struct rendezvous *rv, std::string group, const struct comm_place &place,
               std::chrono::steady_clock::time_point deadline)
        : rv_(rv), group_(std::move(group)), place_(place), deadline_(deadline)
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
                          place_.first + place_.step * strtol(key.c_str(), nullptr, 10), group_.c_str());
        throw Failure(err);
    }
    /* get() waits by itself. */
    void wait(const std::vector<std::string> &) override
    {
    }
    void wait(const std::vector<std::string> &, const milliseconds &) override
    {
    }

  private:
    const struct rendezvous *rv_;
    std::string group_;
    struct comm_place place_;
    std::chrono::steady_clock::time_point deadline_;
};

/* What the groups of one rank share. */
struct Rank {
    struct peers *peers = nullptr;
    milliseconds op_timeout;
    ~Rank()
    {
        peers_close(peers);
    }
};

struct Group {
    std::shared_ptr<Rank> rank;
    std::shared_ptr<gloo::rendezvous::Context> context;
    struct comm_place place;
    int from; /* member that the running operation waits for */
    std::vector<char> scratch;
    bool dead = false;
};

/* ---- reductions ------------------------------------------------------------ */

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

/* Turns what Gloo threw inside an operation into an error that names the rank. */
int explain(Group &g, const char *text, bool timed_out, struct error *err)
{
    g.dead = true;
    int lost = peers_blame(g.rank->peers, timed_out ? 0 : BLAME_WAIT_MS);
    g.context->closeConnections(); /* who waits for us shall wait no longer */
    if (lost >= 0) {
        error_set(err, ERR_PEER_LOST, "lost rank %d", lost);
        return error_hint(err, "the cause is in the log of rank %d", lost);
    }
    if (timed_out) {
        int left = g.place.first + g.from * g.place.step;
        error_set(err, ERR_TIMEOUT, "no answer within %lld ms; waiting for rank %d or for a rank that it waits for",
                  (long long)g.rank->op_timeout.count(), left);
        return error_hint(err, "look at the status of rank %d: it may be stopped, swapping or cut off", left);
    }
    return error_set(err, ERR_PEER_LOST, "lost the connection to another rank: %s", text);
}

/* Runs `body` and keeps every exception inside. */
template <typename Body> int guarded(struct comm *c, struct error *err, Body body)
{
    Group &g = *static_cast<Group *>(c->state);
    if (g.dead)
        return error_set(err, ERR_PEER_LOST, "the group is dead after an earlier error");
    auto start = std::chrono::steady_clock::now();
    g.from = (c->rank + c->size - 1) % c->size; /* in a ring */
    try {
        body(g);
        return ERR_OK;
    } catch (const std::bad_alloc &) {
        g.dead = true;
        return error_set(err, ERR_NOMEM, "out of memory in a collective");
    } catch (const std::exception &e) {
        try {
            bool timed_out = std::chrono::steady_clock::now() - start >= g.rank->op_timeout;
            return explain(g, e.what(), timed_out, err);
        } catch (const std::exception &second) {
            return error_set(err, ERR_PEER_LOST, "%s", second.what());
        }
    }
}

/* ---- operations ------------------------------------------------------------ */

void send_to(Group &g, int to, const char *data, size_t bytes)
{
    if (bytes)
        g.context->getPair(to)->createSendBuffer(SLOT, const_cast<char *>(data), bytes)->send();
}

void receive_from(Group &g, int from, char *data, size_t bytes)
{
    if (bytes)
        g.context->getPair(from)->createRecvBuffer(SLOT, data, bytes)->waitRecv();
}

/* Sends to one neighbour and receives from the other. Sends block, so in every ring some rank, an odd one,
 * must receive first. Empty messages are not sent, on either side. */
void exchange(Group &g, int rank, int to, const char *give, size_t give_bytes, int from, char *take, size_t take_bytes)
{
    if (rank % 2 == 0)
        send_to(g, to, give, give_bytes);
    receive_from(g, from, take, take_bytes);
    if (rank % 2)
        send_to(g, to, give, give_bytes);
}

/* Chunks of a ring: `size` neighbours, as equal as whole elements allow. */
struct Ring {
    int rank, size;
    size_t count, element;
    int right() const
    {
        return (rank + 1) % size;
    }
    int left() const
    {
        return (rank + size - 1) % size;
    }
    int chunk(int i) const
    {
        return (i % size + size) % size;
    }
    size_t begin(int i) const
    {
        return count / (size_t)size * (size_t)i + std::min((size_t)i, count % (size_t)size);
    }
    size_t elements(int i) const
    {
        return begin(i + 1) - begin(i);
    }
    size_t bytes(int i) const
    {
        return elements(i) * element;
    }
    char *at(char *data, int i) const
    {
        return data + begin(i) * element;
    }
};

char *room(Group &g, size_t bytes)
{
    if (g.scratch.size() < bytes)
        g.scratch.resize(bytes);
    return g.scratch.data();
}

/* In step k a rank passes on the partial sum of chunk rank-k-1 and receives that of chunk rank-k-2, so
 * that after size-1 steps it holds the whole of its own chunk. */
void ring_reduce_scatter(Group &g, const Ring &ring, char *data, Reduction reduce)
{
    char *received = room(g, ring.bytes(0));
    for (int k = 0; k + 1 < ring.size; k++) {
        int give = ring.chunk(ring.rank - k - 1), take = ring.chunk(ring.rank - k - 2);
        exchange(g, ring.rank, ring.right(), ring.at(data, give), ring.bytes(give), ring.left(), received,
                 ring.bytes(take));
        reduce(ring.at(data, take), received, ring.at(data, take), ring.elements(take));
    }
}

/* In step k a rank passes on chunk rank-k and receives chunk rank-k-1 in its place. */
void ring_all_gather(Group &g, const Ring &ring, char *data)
{
    for (int k = 0; k + 1 < ring.size; k++) {
        int give = ring.chunk(ring.rank - k), take = ring.chunk(ring.rank - k - 1);
        exchange(g, ring.rank, ring.right(), ring.at(data, give), ring.bytes(give), ring.left(), ring.at(data, take),
                 ring.bytes(take));
    }
}

/* Two ranks: both halves of the ring at once, the same bytes in one round instead of two. Both compute
 * x0 + x1 in this order. */
void swap_and_reduce(Group &g, const Ring &ring, char *data, Reduction reduce)
{
    size_t all = ring.count * ring.element;
    char *theirs = room(g, std::min(all, PIECE));
    for (size_t at = 0; at < all; at += PIECE) {
        size_t bytes = std::min(PIECE, all - at);
        char *mine = data + at;
        exchange(g, ring.rank, ring.right(), mine, bytes, ring.left(), theirs, bytes);
        reduce(mine, ring.rank ? theirs : mine, ring.rank ? mine : theirs, bytes / ring.element);
    }
}

/* Segments that lie one behind the other in memory go as one message. */
int gloo_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n, enum comm_op op,
                    struct error *err)
{
    (void)ks;
    return guarded(c, err, [&](Group &g) {
        for (int i = 0, next; i < n; i = next) {
            enum dtype dtype = segments[i].dtype;
            char *data = static_cast<char *>(segments[i].data), *end = data;
            for (next = i; next < n && segments[next].dtype == dtype && segments[next].data == end; next++)
                end += (size_t)segments[next].count * dtype_size(dtype);
            Ring ring = {c->rank, c->size, (size_t)(end - data) / dtype_size(dtype), dtype_size(dtype)};
            if (c->size == 2) {
                swap_and_reduce(g, ring, data, reductions[op][dtype]);
            } else {
                ring_reduce_scatter(g, ring, data, reductions[op][dtype]);
                ring_all_gather(g, ring, data);
            }
        }
    });
}

int gloo_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk, enum dtype dtype,
                        struct error *err)
{
    (void)ks;
    return guarded(c, err, [&](Group &g) {
        size_t bytes = (size_t)chunk * dtype_size(dtype);
        Ring ring = {c->rank, c->size, (size_t)chunk * (size_t)c->size, dtype_size(dtype)};
        ring_reduce_scatter(g, ring, static_cast<char *>(data), reductions[COMM_SUM][dtype]);
        std::memmove(out, static_cast<char *>(data) + (size_t)c->rank * bytes, bytes);
    });
}

int gloo_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk, enum dtype dtype,
                    struct error *err)
{
    (void)ks;
    return guarded(c, err, [&](Group &g) {
        size_t bytes = (size_t)chunk * dtype_size(dtype);
        Ring ring = {c->rank, c->size, (size_t)chunk * (size_t)c->size, dtype_size(dtype)};
        std::memmove(static_cast<char *>(out) + (size_t)c->rank * bytes, in, bytes);
        ring_all_gather(g, ring, static_cast<char *>(out));
    });
}

/* As in a ring: neighbours of a chain are an even and an odd rank. */
int gloo_exchange(struct comm *c, struct kstream *ks, const struct comm_message *send, const struct comm_message *recv,
                  struct error *err)
{
    (void)ks;
    return guarded(c, err, [&](Group &g) {
        g.from = recv ? recv->peer : send->peer;
        auto give = [&] {
            for (int i = 0; send && i < send->n; i++)
                send_to(g, send->peer, static_cast<const char *>(send->segments[i].data),
                        (size_t)send->segments[i].count * dtype_size(send->segments[i].dtype));
        };
        if (c->rank % 2 == 0)
            give();
        for (int i = 0; recv && i < recv->n; i++)
            receive_from(g, recv->peer, static_cast<char *>(recv->segments[i].data),
                         (size_t)recv->segments[i].count * dtype_size(recv->segments[i].dtype));
        if (c->rank % 2)
            give();
    });
}

void gloo_destroy(struct comm *c)
{
    delete static_cast<Group *>(c->state);
    c->state = nullptr;
}

const struct comm_backend gloo_backend = {
    "gloo", gloo_all_reduce, gloo_reduce_scatter, gloo_all_gather, gloo_exchange, gloo_destroy, false,
    nullptr, nullptr, nullptr, nullptr,
};

/* ---- connecting ------------------------------------------------------------ */

std::shared_ptr<gloo::rendezvous::Context> connect(const struct comm_place &place, const std::string &group,
                                                   const struct rendezvous *rv,
                                                   std::shared_ptr<gloo::transport::Device> &device,
                                                   milliseconds timeout, milliseconds op_timeout)
{
    GroupStore store(rv, group, place, std::chrono::steady_clock::now() + timeout);
    auto context = std::make_shared<gloo::rendezvous::Context>(place.rank, place.size);
    /* Gloo fixes a connection's deadline when it is made. */
    context->setTimeout(op_timeout);
    context->connectFullMesh(store, device);
    for (int i = 0; i < place.size; i++)
        if (i != place.rank)
            context->getPair(i)->setSync(true, false);
    return context;
}

/* The group's end of this rank. A group of all ranks shares the world's connections; a group of one has none. */
void join(struct comms *all, enum comm_group group, const struct comm_place &place, int world_rank,
          const std::shared_ptr<Rank> &rank, const std::shared_ptr<gloo::rendezvous::Context> &context)
{
    struct comm *c = comms_group(all, group);
    c->backend = &gloo_backend;
    c->group = group;
    c->rank = place.rank;
    c->size = place.size;
    c->world_rank = world_rank;
    c->counters = &all->counters;
    c->seconds = &all->seconds[group];
    if (!context)
        return;
    auto state = std::make_unique<Group>();
    state->rank = rank;
    state->context = context;
    state->place = place;
    c->state = state.release();
}

} // namespace

int gloo_comms_create(int rank, const struct comm_layout *layout, const char *bind_address, const struct rendezvous *rv,
                      int connect_timeout_ms, int op_timeout_ms, struct comms *out, struct error *err)
{
    std::memset(out, 0, sizeof *out);
    int world = comm_world_size(layout);
    try {
        milliseconds timeout(connect_timeout_ms);
        auto shared = std::make_shared<Rank>();
        shared->op_timeout = milliseconds(op_timeout_ms);
        int rc = peers_connect(rank, world, bind_address, rv, connect_timeout_ms, &shared->peers, err);
        if (rc)
            return rc;
        gloo::transport::tcp::attr attributes;
        attributes.hostname = bind_address;
        auto device = gloo::transport::tcp::CreateDevice(attributes);
        std::shared_ptr<gloo::rendezvous::Context> contexts[GROUP_COUNT];
        struct comm_place places[GROUP_COUNT];
        for (int g = 0; g < GROUP_COUNT; g++) {
            places[g] = comm_place_of(layout, rank, (enum comm_group)g);
            std::string name = comm_group_name((enum comm_group)g);
            if (g != GROUP_WORLD && places[g].size == world)
                contexts[g] = contexts[GROUP_WORLD];
            else if (places[g].size > 1 || g == GROUP_WORLD)
                contexts[g] = connect(places[g], g == GROUP_WORLD ? name : name + std::to_string(places[g].first), rv,
                                      device, timeout, shared->op_timeout);
        }
        for (int g = 0; g < GROUP_COUNT; g++)
            join(out, (enum comm_group)g, places[g], rank, shared, contexts[g]);
        return ERR_OK;
    } catch (const Failure &failure) {
        comms_destroy(out);
        if (err)
            *err = failure.error;
        return failure.error.code;
    } catch (const std::bad_alloc &) {
        comms_destroy(out);
        return error_set(err, ERR_NOMEM, "out of memory while connecting the ranks");
    } catch (const std::exception &e) {
        comms_destroy(out);
        error_set(err, ERR_PEER_LOST, "cannot connect the ranks over %s: %s", bind_address, e.what());
        return error_hint(err, "the agent's data address must be an address of its machine that the other nodes reach");
    }
}
