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

/* In a full pipeline the backward that comes next is of a micro-batch stages - stage - 1 behind the last forward. */
bool pipeline_depends(int64_t stages, int64_t stage, struct work done, struct work next)
{
    return done.kind == WORK_FORWARD && next.kind == WORK_BACKWARD && done.micro - next.micro < stages - stage - 1;
}

int pipeline_exchange(struct engine *e, struct work done, struct work next, enum comm_pass pass, struct error *err)
{
    int stage = e->stage.index;
    struct comm_segment out = {.count = plan_boundary_elements(e->plan), .dtype = e->k->act}, in = out;
    struct comm_message send = {.segments = &out, .n = 1}, recv = {.segments = &in, .n = 1};
    bool sends = false, receives = false;
    if (done.kind == WORK_FORWARD && !e->stage.last) {
        sends = true;
        send.peer = stage + 1;
        send.pass = pass;
        out.data = engine_buffer(e, BUF_XF, 0);
    } else if (done.kind == WORK_BACKWARD && !e->stage.first) {
        sends = true;
        send.peer = stage - 1;
        send.pass = PASS_BACKWARD;
        out.data = engine_buffer(e, BUF_DX, 0);
    }
    e->slot = next.micro % e->stage.slots;
    if (next.kind == WORK_FORWARD && !e->stage.first) {
        receives = true;
        recv.peer = stage - 1;
        recv.pass = pass;
        in.data = engine_buffer(e, BUF_X1, e->stage.layer0);
    } else if (next.kind == WORK_BACKWARD && !e->stage.last) {
        receives = true;
        recv.peer = stage + 1;
        recv.pass = PASS_BACKWARD;
        in.data = engine_buffer(e, BUF_DX_IN, 0);
    }
    const struct comm_message *out_first = sends ? &send : NULL;
    int rc = ERR_OK;
    if (pipeline_depends(e->plan->pp, stage, done, next)) {
        rc = comm_exchange(&e->comms->pp, e->ks, out_first, NULL, "stage border", err);
        out_first = NULL;
    }
    if (!rc)
        rc = comm_exchange(&e->comms->pp, e->ks, out_first, receives ? &recv : NULL, "stage border", err);
    return rc;
}

void pipeline_hand_on(struct engine *e)
{
    const struct plan *p = e->plan;
    int64_t last = e->stage.layer0 + e->stage.layers - 1;
    e->k->residual_gain(e->ks, p->T, e->w.x, engine_buffer(e, BUF_X2, last), engine_buffer(e, BUF_Y, 0), NULL,
                        engine_buffer(e, BUF_XF, 0), NULL, engine_buffer(e, BUF_K, 0));
}

void pipeline_take_over(struct engine *e)
{
    e->k->cast(e->ks, e->k->act, engine_buffer(e, BUF_DX, 0), e->k->act, engine_buffer(e, BUF_DX_IN, 0),
               plan_boundary_elements(e->plan));
}
