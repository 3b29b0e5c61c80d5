/* pipeline.h */
#include "worker/pipeline.h"

#include "worker/engine_internal.h"

struct work pipeline_work(int64_t stages, int64_t stage, int64_t n, int64_t k)
{
    int64_t ahead = stages - stage - 1 < n ? stages - stage - 1 : n; /* forwards before the first backward */
    int64_t turns = 2 * (n - ahead);
    if (k < 0 || k >= 2 * n)
        return (struct work){WORK_NONE, 0};
    if (k < ahead)
        return (struct work){WORK_FORWARD, k};
    k -= ahead;
    if (k >= turns)
        return (struct work){WORK_BACKWARD, n - ahead + k - turns};
    return k % 2 ? (struct work){WORK_BACKWARD, k / 2} : (struct work){WORK_FORWARD, ahead + k / 2};
}

/* What crosses a border: the residual stream, and with LAX the latents of all sites. */
struct border {
    struct comm_segment segments[1 + SITE_COUNT];
    int n;
};

static void add_segment(const struct engine *e, struct border *b, void *data, int64_t columns)
{
    b->segments[b->n++] = (struct comm_segment){data, e->plan->T * columns, e->k->act};
}

static void add_latents(struct engine *e, struct border *b, enum plan_buffer first, int64_t layer)
{
    for (enum plan_site site = 0; site < SITE_COUNT && e->plan->lax; site++)
        add_segment(e, b, engine_buffer(e, first + site, layer), plan_branches(site).count * e->w.latent);
}

/* Residual and latents behind the last block; those in front of the first. */
static void forward_out(struct engine *e, struct border *b)
{
    add_segment(e, b, engine_buffer(e, BUF_XF, 0), e->w.x);
    add_latents(e, b, BUF_Z_QKV, e->stage.layer0 + e->stage.layers - 1);
}

static void forward_in(struct engine *e, struct border *b)
{
    add_segment(e, b, engine_buffer(e, BUF_X1, e->stage.layer0), e->w.x);
    add_latents(e, b, BUF_Z_QKV, e->stage.layer0 - 1);
}

/* Their gradients. What comes in waits apart: at the same time what this stage made goes out. */
static void backward_out(struct engine *e, struct border *b)
{
    add_segment(e, b, engine_buffer(e, BUF_DX, 0), e->w.x);
    add_latents(e, b, BUF_CROSS_QKV, 0);
}

static void backward_in(struct engine *e, struct border *b)
{
    char *at = engine_buffer(e, BUF_CROSS_IN, 0);
    add_segment(e, b, engine_buffer(e, BUF_DX_IN, 0), e->w.x);
    for (enum plan_site site = 0; site < SITE_COUNT && e->plan->lax; site++) {
        int64_t columns = plan_branches(site).count * e->w.latent;
        add_segment(e, b, at, columns);
        at = act_at(e, at, e->plan->T * columns);
    }
}

/* In a full pipeline the backward that comes next is of a micro-batch stages - stage - 1 behind the last forward. */
bool pipeline_depends(int64_t stages, int64_t stage, struct work done, struct work next)
{
    return done.kind == WORK_FORWARD && next.kind == WORK_BACKWARD && done.micro - next.micro < stages - stage - 1;
}

int pipeline_exchange(struct engine *e, struct work done, struct work next, enum comm_pass pass, struct error *err)
{
    int stage = e->stage.index;
    struct border out = {.n = 0}, in = {.n = 0};
    struct comm_message send = {.segments = out.segments}, recv = {.segments = in.segments};
    if (done.kind == WORK_FORWARD && !e->stage.last) {
        forward_out(e, &out);
        send.peer = stage + 1;
        send.pass = pass;
    } else if (done.kind == WORK_BACKWARD && !e->stage.first) {
        backward_out(e, &out);
        send.peer = stage - 1;
        send.pass = PASS_BACKWARD;
    }
    e->slot = next.micro % e->stage.slots;
    if (next.kind == WORK_FORWARD && !e->stage.first) {
        forward_in(e, &in);
        recv.peer = stage - 1;
        recv.pass = pass;
    } else if (next.kind == WORK_BACKWARD && !e->stage.last) {
        backward_in(e, &in);
        recv.peer = stage + 1;
        recv.pass = PASS_BACKWARD;
    }
    send.n = out.n;
    recv.n = in.n;
    const struct comm_message *give = out.n ? &send : NULL, *take = in.n ? &recv : NULL;
    int rc = ERR_OK;
    if (pipeline_depends(e->plan->pp, stage, done, next)) {
        rc = comm_exchange(&e->comms->pp, e->ks, give, NULL, "stage border", err);
        give = NULL;
    }
    return rc ? rc : comm_exchange(&e->comms->pp, e->ks, give, take, "stage border", err);
}

void pipeline_hand_on(struct engine *e)
{
    const struct plan *p = e->plan;
    struct addends sum = block_sum(e, e->stage.layer0 + e->stage.layers - 1);
    if (sum.y)
        e->k->residual_gain(e->ks, p->T, e->w.x, sum.x, sum.y, NULL, engine_buffer(e, BUF_XF, 0), NULL,
                            engine_buffer(e, BUF_K, 0));
}

void pipeline_take_over(struct engine *e)
{
    struct border in = {.n = 0}, to = {.n = 0};
    backward_in(e, &in);
    backward_out(e, &to);
    for (int i = 0; i < in.n; i++)
        e->k->cast(e->ks, e->k->act, to.segments[i].data, e->k->act, in.segments[i].data, in.segments[i].count);
}
