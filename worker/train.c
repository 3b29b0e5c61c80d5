/* train.h */
#include "worker/train.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "proto/rankfiles.h"
#include "worker/agreement.h"
#include "worker/checkpoint.h"
#include "worker/pace.h"
#include "worker/data.h"
#include "worker/engine.h"
#include "worker/hf.h"
#include "worker/plan/flops.h"
#include "worker/schedule.h"

enum { IDENTITY_MAX = 1 << 20 }; /* 4096 files of at most 100 bytes */

struct run {
    const struct train *t;
    const Boost__JobSpec *spec;
    struct engine *engine;
    struct data data;
    struct buffer identity; /* of data, on rank 0 */
    struct checkpoint *checkpoint;
    struct agreement agreement;
    double checkpoint_cost_s; /* that training stands still for one, smoothed; 0: not known yet */
    struct run_position at;
    int64_t saved_step; /* of the newest checkpoint known here, -1: none */
    int64_t eval_step;  /* of the newest evaluation, -1: none */
    double eval_loss;
    bool stopped;
    bool put_off; /* a checkpoint was agreed while updates were being skipped */
};

static int prepare(struct run *r, struct error *err);
static void tell_files(const struct run *r);
static void tell_note(const struct run *r);
static void tell_changes(struct run *r);
static int start_weights(struct run *r, struct error *err);
static int one_step(struct run *r, struct error *err);
static int evaluate(struct run *r, struct error *err);
static int finish(struct run *r, struct error *err);
static void release(struct run *r, const struct error *why);

int train(const struct train *t, struct train_end *end, struct error *err)
{
    struct run r = {.t = t, .spec = t->start->spec, .saved_step = -1, .eval_step = -1, .eval_loss = NAN};
    spike_init(&r.at.spike, SPIKE_FADE);
    buffer_init(&r.identity, IDENTITY_MAX);
    int rc = prepare(&r, err);
    if (!rc)
        rc = start_weights(&r, err);
    if (!rc && r.spec->run->eval_every && r.at.step == 0)
        rc = evaluate(&r, err);
    while (!rc && !r.stopped && r.at.step < r.spec->run->steps)
        rc = one_step(&r, err);
    if (!rc)
        rc = finish(&r, err);
    *end = (struct train_end){.step = r.at.step, .stopped = r.stopped, .eval_loss = r.eval_loss};
    release(&r, rc ? err : NULL);
    return rc;
}

/* ---- before the first step ------------------------------------------------------- */

static void show_work(void *arg, const char *doing)
{
    report_doing(arg, "training: %s", doing);
}

static int prepare(struct run *r, struct error *err)
{
    const struct train *t = r->t;
    struct report *report = t->report;
    report_phase(report, BOOST__RANK_UPDATE__PHASE__LOADING);
    report_doing(report, "opening the data");
    int rc = data_open(&r->data, r->spec, t->plan, t->rank, err);
    if (!rc && r->spec->run->eval_every && !r->data.has_eval) {
        rc = error_set(err, ERR_INVALID, "run.eval_every = %" PRId64 " needs a data.eval file",
                       r->spec->run->eval_every);
        error_hint(err, "add data.eval or leave run.eval_every out");
    }
    if (rc)
        return rc;
    tell_files(r);
    if (t->rank == 0 && (rc = data_identity(&r->data, &r->identity, err)))
        return rc;
    report_doing(report, "making the engine");
    rc = engine_create(t->plan, t->kernels, t->comms, t->rank, t->start->threads_per_rank, &r->engine, err);
    if (!rc) {
        const char *graphs = getenv("BOOST_CUDA_GRAPHS"); /* to look for a fault step by step */
        engine_set_capture(r->engine, !graphs || strcmp(graphs, "0"));
        engine_watch(r->engine, show_work, report);
        tell_note(r);
    }
    if (!rc)
        rc = checkpoint_open(t->start, t->plan, r->engine, t->rank, (const char *)r->identity.data, report->status,
                             &r->checkpoint, err);
    report_progress(report);
    return rc;
}

/* What the engine has to say of this rank's device. */
static void tell_note(const struct run *r)
{
    const char *note = engine_note(r->engine);
    if (note)
        report_line(r->t->report, "rank %d: %s", r->t->rank, note);
}

static void tell_files(const struct run *r)
{
    enum { FILES_TOLD = 16 };
    for (int i = 0; r->t->rank == 0 && r->data.train.n > 1 && i < r->data.train.n && i < FILES_TOLD; i++) {
        char line[512];
        data_describe(&r->data, i, line, sizeof line);
        report_line(r->t->report, "%s", line);
    }
}

/* The position is of the order that the data had then. Who appends to a file or takes others means to go on, and who
 * does not learns it here, while the checkpoint is still there. */
static void tell_changes(struct run *r)
{
    char what[600];
    int n = r->at.data ? data_changes(&r->data, r->at.data, what, sizeof what) : 0;
    if (!n)
        return;
    report_warn(r->t->report, r->at.step, "data_changed", n,
                "the training data is not that of the checkpoint of step %" PRId64 ": %s; samples go on in the order "
                "of the data as it is now: some may come again, others never (to go on exactly, put the data back "
                "and restart from step %" PRId64 ")",
                r->at.step, what, r->at.step);
}

static int start_weights(struct run *r, struct error *err)
{
    const Boost__CheckpointRef *resume = r->t->start->resume;
    struct report *report = r->t->report;
    int rc;
    if (resume && resume->weights_only) {
        report_doing(report, "reading the weights of %s", resume->path);
        rc = engine_init_weights(r->engine, err);
        if (!rc && hf_is_dir(resume->path))
            rc = checkpoint_restore_hf(resume->path, r->spec, r->engine, report->status, err);
        else if (!rc)
            rc = checkpoint_restore_weights(resume->path, r->t->plan, r->engine, r->t->rank, report->status, err);
    } else if (resume) {
        report_doing(report, "restoring the checkpoint");
        rc = checkpoint_restore(resume->path, r->t->plan, r->engine, r->t->rank, report->status, &r->at, err);
        if (!rc && resume->has_step && resume->step != r->at.step)
            rc = error_set(err, ERR_CORRUPT, "resume: checkpoint %s is of step %" PRId64 ", not %" PRId64, resume->path,
                           r->at.step, resume->step);
        r->saved_step = r->at.step;
        tell_note(r);
        if (!rc)
            tell_changes(r);
    } else {
        report_doing(report, "drawing the initial weights");
        rc = engine_init_weights(r->engine, err);
    }
    if (rc)
        return rc;
    const Boost__Checkpoint *c = r->spec->checkpoint;
    bool by_steps = c->interval == BOOST__INTERVAL__VALUE__STEPS;
    bool chosen = c->interval == BOOST__INTERVAL__VALUE__AUTO;
    int64_t every_ns = chosen ? (int64_t)(PACE_FIRST_S * NS_PER_S) : by_steps ? 0 : c->every_seconds * NS_PER_S;
    agreement_init(&r->agreement, r->at.step, r->spec->run->steps, by_steps ? c->every_steps : 0, every_ns,
                   r->t->rank == 0, clock_mono_ns());
    report_progress(report);
    report_step_done(report, r->at.step);
    report_phase(report, BOOST__RANK_UPDATE__PHASE__TRAINING);
    report_doing(report, "training");
    if (r->t->rank == 0)
        report_line(report,
                    "attempt %d: step %" PRId64 " of %" PRId64 "%s%s; %" PRId64
                    " parameters on %d ranks (tp %d, pp %d, dp %d), %" PRId64 " training windows, a shard is %" PRId64
                    " bytes",
                    r->t->start->attempt, r->at.step, r->spec->run->steps, resume ? " from " : "",
                    resume ? resume->path : "", plan_parameters(r->t->plan), r->t->plan->world, r->t->plan->tp,
                    r->t->plan->pp, r->t->plan->dp, r->data.train.windows, checkpoint_bytes(r->checkpoint));
    return ERR_OK;
}

/* ---- one step ---------------------------------------------------------------------- */

/* Clocks at the start of a step, to take differences from. */
struct step_times {
    int64_t start_ns, data_ns, end_ns;
    double comm, gemm;
};

static int checkpoint_now(struct run *r, struct error *err);
static int book(struct run *r, const struct step_result *result, struct error *err);
static void tell(struct run *r, const struct step_result *result, double lr, const struct step_times *began);

static int one_step(struct run *r, struct error *err)
{
    struct report *report = r->t->report;
    int64_t n = r->at.step + 1;
    struct step_times times = {
        .start_ns = clock_mono_ns(), .comm = comms_seconds(r->t->comms), .gemm = engine_gemm_seconds(r->engine)};
    const struct micro_batch *micro;
    int rc = data_train(&r->data, n, &micro, err);
    if (rc)
        return rc;
    times.data_ns = clock_mono_ns();

    struct agreement_facts facts = {.stop = report_stop_asked(report),
                                    .asked = report_checkpoints_asked(report),
                                    .busy = checkpoint_busy(r->checkpoint),
                                    .now_ns = times.data_ns};
    struct agreement_votes votes = agreement_vote(&r->agreement, n, &facts);
    struct step_request request = {.lr = schedule_lr(r->spec->optimizer, r->spec->run->steps, n),
                                   .stop = votes.stop,
                                   .checkpoint = votes.checkpoint,
                                   .busy = votes.busy,
                                   .asked = votes.asked};
    struct step_result result;
    rc = engine_step(r->engine, micro, &request, &result, report_progress, report, err);
    if (rc)
        return error_context(err, "step %" PRId64, n);
    times.end_ns = clock_mono_ns();

    rc = book(r, &result, err);
    tell(r, &result, request.lr, &times);
    if (rc)
        return rc;
    struct agreement_votes joined = {
        .stop = result.stop, .checkpoint = result.checkpoint, .busy = result.busy, .asked = result.asked};
    struct agreement_actions actions = agreement_settle(&r->agreement, n, &joined);
    /* What was voted on with this step is of the next. */
    if (actions.postponed && r->t->rank == 0)
        report_line(report, "step %" PRId64 ": checkpoint postponed, the last one is still being written", n + 1);
    if (actions.skipped && r->t->rank == 0)
        report_line(report,
                    "step %" PRId64 ": %" PRId64 " more checkpoint%s fell due while the last one was written, and "
                    "%s skipped: writing one takes longer than checkpoint.every_steps",
                    n + 1, actions.skipped, actions.skipped == 1 ? "" : "s", actions.skipped == 1 ? "was" : "were");
    /* What makes updates not finite may already be in the weights: such a checkpoint must not take the place
     * of an older one in the retention. All ranks skip together, so no vote is needed. */
    bool due = actions.checkpoint || r->put_off;
    if (due && result.skipped && !r->put_off && r->t->rank == 0)
        report_line(report, "step %" PRId64 ": checkpoint postponed until an update is finite again", n);
    r->put_off = due && result.skipped;
    if (due && !result.skipped && n < r->spec->run->steps)
        rc = checkpoint_now(r, err);
    if (!rc && r->spec->run->eval_every && n % r->spec->run->eval_every == 0)
        rc = evaluate(r, err);
    r->stopped = actions.stop && n < r->spec->run->steps;
    return rc;
}

static const char *why_skipped(const struct step_result *result)
{
    return result->tokens ? "loss or gradient was not finite" : "no token had a loss";
}

/* Moves the position on; an error when too many updates in a row were skipped. */
static int book(struct run *r, const struct step_result *result, struct error *err)
{
    r->at.step++;
    r->at.samples = r->at.step * r->t->plan->global_batch;
    r->at.tokens += result->tokens;
    r->at.skipped += result->skipped;
    r->at.skipped_run = result->skipped ? r->at.skipped_run + 1 : 0;
    report_step_done(r->t->report, r->at.step);
    if (r->at.skipped_run < r->spec->optimizer->max_skipped)
        return ERR_OK;
    int64_t first, last, from = r->at.step - r->at.skipped_run + 1, ignored;
    data_range(&r->data, from, &first, &ignored);
    data_range(&r->data, r->at.step, &ignored, &last);
    error_set(err, ERR_REFUSED,
              "%" PRId64 " updates in a row were skipped because %s: steps %" PRId64 " to %" PRId64 ", samples %" PRId64
              " to %" PRId64,
              r->at.skipped_run, why_skipped(result), from, r->at.step, first, last);
    if (!result->tokens)
        return error_hint(err, "look at these samples, data.pad_id and data.mask_eod: every target is masked");
    return error_hint(err, "lower optimizer.lr or lengthen its warm-up; look at these samples");
}

static void tell(struct run *r, const struct step_result *result, double lr, const struct step_times *times)
{
    const struct train *t = r->t;
    int64_t n = r->at.step, steps = r->spec->run->steps;
    double seconds = (double)(times->end_ns - times->start_ns) / (double)NS_PER_S;
    double rate = seconds > 0 ? (double)result->tokens / seconds : NAN;
    double loss = result->tokens ? result->loss : NAN, z = spike_z(&r->at.spike, loss), mean = r->at.spike.mean;
    spike_add(&r->at.spike, loss);
    bool due = n % r->spec->run->log_every == 0 || n == steps || result->skipped || z > SPIKE_BOUND;
    if (!due)
        return;
    struct metrics m = {.n = 0};
    if (t->rank == 0) {
        metrics_add(&m, "loss", loss);
        metrics_add(&m, "loss_z", z);
        metrics_add(&m, "lr", lr);
        metrics_add(&m, "grad_norm", result->grad_norm);
        metrics_add(&m, "tokens", (double)r->at.tokens);
        metrics_add(&m, "tokens_per_s", rate);
        metrics_add(&m, "mfu", plan_mfu(t->plan, seconds, t->start->peak_flops));
        metrics_add(&m, "skipped", (double)r->at.skipped);
    }
    metrics_add(&m, "step_ms", seconds * 1e3);
    double gemm = engine_gemm_seconds(r->engine) - times->gemm;
    if (!isnan(gemm)) { /* else both are done by a device, and the host's clock tells nothing of them */
        metrics_add(&m, "comm_ms", (comms_seconds(t->comms) - times->comm) * 1e3);
        metrics_add(&m, "gemm_ms", gemm * 1e3);
    }
    metrics_add(&m, "data_ms", (double)(times->data_ns - times->start_ns) / (double)NS_PER_MS);
    report_metrics(t->report, n, &m);
    if (t->rank != 0)
        return;
    char count[32];
    report_line(t->report, "step %" PRId64 "/%" PRId64 " loss %.4f lr %.2e gnorm %.3f tok/s %s", n, steps, result->loss,
                lr, result->grad_norm, report_count(rate, count, sizeof count));
    int64_t first, last;
    data_range(&r->data, n, &first, &last);
    if (z > SPIKE_BOUND)
        report_line(t->report,
                    "step %" PRId64 ": loss %.4f is %.1f standard deviations above its mean of late, %.4f (samples "
                    "%" PRId64 " to %" PRId64 ")",
                    n, loss, z, mean, first, last);
    if (result->skipped)
        report_line(t->report,
                    "step %" PRId64 ": update skipped, %s (samples %" PRId64 " to %" PRId64 "); %" PRId64 " in a row",
                    n, why_skipped(result), first, last, r->at.skipped_run);
}

/* ---- checkpoint and evaluation ----------------------------------------------------- */

/* The interval that follows from what checkpoints have cost so far. Rank 0's is the one that counts. */
static void choose_interval(struct run *r, double cost_s, struct metrics *m)
{
    const Boost__AttemptStart *start = r->t->start;
    double failure = start->mean_failure_s > 0 ? start->mean_failure_s : PACE_FAILURE_S;
    r->checkpoint_cost_s = r->checkpoint_cost_s > 0 ? 0.5 * (r->checkpoint_cost_s + cost_s) : cost_s;
    double seconds = pace_seconds(r->checkpoint_cost_s, failure);
    r->agreement.every_ns = (int64_t)(seconds * NS_PER_S);
    metrics_add(m, "ckpt_every_s", seconds);
    metrics_add(m, "ckpt_cost_s", r->checkpoint_cost_s);
    metrics_add(m, "mean_failure_s", failure);
}

static int checkpoint_now(struct run *r, struct error *err)
{
    struct report *report = r->t->report;
    struct error last;
    struct metrics m = {.n = 0};
    int64_t start = clock_mono_ns();
    if (!checkpoint_busy(r->checkpoint) && checkpoint_wait(r->checkpoint, &last))
        report_line(report, "rank %d: the last checkpoint failed: %s", r->t->rank, last.message);
    report_doing(report, "copying the state of step %" PRId64, r->at.step);
    int rc = engine_adam_t(r->engine, &r->at.adam_t, err);
    if (!rc)
        rc = checkpoint_snapshot(r->checkpoint, &r->at, err);
    tell_note(r);
    report_doing(report, "training");
    if (rc)
        return rc;
    r->saved_step = r->at.step;
    double stall_ms = (double)(clock_mono_ns() - start) / (double)NS_PER_MS;
    metrics_add(&m, "ckpt_ms", stall_ms);
    if (r->spec->checkpoint->interval == BOOST__INTERVAL__VALUE__AUTO)
        choose_interval(r, stall_ms / 1e3, &m);
    if (r->t->rank == 0)
        report_metrics(report, r->at.step, &m);
    return ERR_OK;
}

static int evaluate(struct run *r, struct error *err)
{
    struct report *report = r->t->report;
    const struct plan *plan = r->t->plan;
    double loss = 0, tokens = 0;
    report_phase(report, BOOST__RANK_UPDATE__PHASE__EVALUATING);
    for (int64_t i = plan_dp_rank(plan, r->t->rank); i < data_eval_count(&r->data); i += plan->dp) {
        const struct micro_batch *micro;
        double loss_sum, count;
        int rc = data_eval(&r->data, i, &micro, err);
        if (!rc)
            rc = engine_eval(r->engine, micro, &loss_sum, &count, err);
        if (rc)
            return error_context(err, "evaluation after step %" PRId64, r->at.step);
        loss += loss_sum;
        tokens += count;
        report_progress(report);
    }
    int rc = engine_eval_total(r->engine, &loss, &tokens, err);
    if (rc)
        return error_context(err, "evaluation after step %" PRId64, r->at.step);
    report_phase(report, BOOST__RANK_UPDATE__PHASE__TRAINING);
    r->eval_loss = loss / tokens;
    r->eval_step = r->at.step;
    if (r->t->rank != 0)
        return ERR_OK;
    struct metrics m = {.n = 0};
    metrics_add(&m, "eval_loss", r->eval_loss);
    report_metrics(report, r->at.step, &m);
    report_line(report, "step %" PRId64 "/%" PRId64 " eval_loss %.4f over %.0f tokens", r->at.step, r->spec->run->steps,
                r->eval_loss, tokens);
    return ERR_OK;
}

/* ---- after the last step ------------------------------------------------------------ */

static int finish(struct run *r, struct error *err)
{
    struct report *report = r->t->report;
    int rc = ERR_OK;
    if (r->saved_step != r->at.step)
        rc = checkpoint_now(r, err);
    if (!rc && !r->stopped && r->spec->run->eval_every && r->eval_step != r->at.step)
        rc = evaluate(r, err);
    if (rc)
        return rc;
    report_phase(report, BOOST__RANK_UPDATE__PHASE__SAVING);
    report_doing(report, "writing the checkpoint of step %" PRId64, r->at.step);
    rc = checkpoint_wait(r->checkpoint, err);
    if (rc && r->stopped) {
        report_line(report, "rank %d: stopped at step %" PRId64 " without its checkpoint: %s", r->t->rank, r->at.step,
                    err->message);
        error_clear(err);
        return ERR_OK;
    }
    if (rc == ERR_IO || rc == ERR_NOSPACE || rc == ERR_NOT_FOUND) /* no fault of the job's, whatever was missing */
        err->code = ERR_DEVICE;
    if (rc)
        return error_context(err, RANK_FINAL_CHECKPOINT);
    if (r->t->rank == 0)
        report_line(report, "%s at step %" PRId64, r->stopped ? "stopped" : "completed", r->at.step);
    return ERR_OK;
}

/* `why` the rank failed, or NULL. */
static void release(struct run *r, const struct error *why)
{
    checkpoint_close(r->checkpoint);
    if (why) /* freeing a device's memory waits for its kernels, which may wait for other ranks */
        comms_abort(r->t->comms, why);
    if (r->engine)
        engine_destroy(r->engine);
    data_close(&r->data);
    buffer_free(&r->identity);
    free(r->at.data);
}
