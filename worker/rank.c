/* rank.h */
#include "worker/rank.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "proto/rankfiles.h"
#include "worker/cuda.h"
#include "worker/engine.h"
#include "worker/plan/plan.h"
#include "worker/rendezvous.h"
#include "worker/report.h"
#include "worker/stacks.h"
#include "worker/train.h"

/* A collective that takes longer is given up. A lost peer is seen at once by its closed connection
 * and a hang is the agent's to end, so this only bounds a partition that nobody else sees. */
enum { OPERATION_TIMEOUT_MS = 15 * 60 * 1000 };

int rank_exit_code(const struct error *err)
{
    switch (err->code) {
    case ERR_OK:
        return 0;
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
    case ERR_NOT_FOUND:
        return RANK_EXIT_SPEC;
    case ERR_PEER_LOST:
    case ERR_TIMEOUT:
    case ERR_UNREACHABLE:
        return RANK_EXIT_PEER;
    case ERR_DEVICE:
        return RANK_EXIT_INFRA;
    default:
        return RANK_EXIT_APP;
    }
}

static int check_orders(const struct rank_orders *o, const struct plan *plan, struct error *err)
{
    const Boost__AttemptStart *s = o->start;
    if (!s->run_dir || !s->checkpoint_dir)
        return error_set(err, ERR_INVALID, "start.pb names no run directory or no checkpoint directory");
    if (s->world != plan->world)
        return error_set(err, ERR_INVALID, "start.pb says %d ranks, the layout of its job has %d", s->world,
                         plan->world);
    if (o->rank < 0 || o->rank >= plan->world)
        return error_set(err, ERR_INVALID, "rank %d is not below the %d ranks of the job", o->rank, plan->world);
    if (s->threads_per_rank < 1)
        return error_set(err, ERR_INVALID, "start.pb gives rank %d no threads", o->rank);
    return ERR_OK;
}

/* A rank while it runs. */
struct life {
    const struct rank_orders *orders;
    struct plan plan;
    const struct cuda_library *cuda; /* NULL: on the CPU */
    struct report report;
    struct comms comms;
    struct local_world *alone; /* of a rank that has no other */
    bool reporting, connected;
    atomic_flag *ending; /* set by the one that records the rank's end */
};

static int check_cuda(const struct rank_orders *o, const struct plan *plan, struct error *err)
{
    if (plan->precision != BOOST__PRECISION__VALUE__BF16) {
        error_set(err, ERR_UNSUPPORTED, "run.precision of this job is not built for CUDA");
        return error_hint(err, "set run.precision to BF16, or resources.device to CPU");
    }
    if (plan->world > 1 && (o->local || !o->end_process)) {
        error_set(err, ERR_UNSUPPORTED, "%d ranks as threads of one process cannot share a CUDA device", plan->world);
        return error_hint(err, "submit the job to boostd, which starts a process for each rank");
    }
    return ERR_OK;
}

static int open_cuda(struct life *l, const struct kernels **out, struct error *err)
{
    int rc = check_cuda(l->orders, &l->plan, err);
    if (rc)
        return rc;
    rc = cuda_library_open(&l->cuda, err);
    if (rc == ERR_UNSUPPORTED)
        rc = err->code = ERR_DEVICE; /* this machine's installation is wrong, not the job */
    if (!rc)
        *out = l->cuda->kernels();
    return rc;
}

static int choose_kernels(struct life *l, const struct kernels **out, struct error *err)
{
    const Boost__Resources *res = l->orders->start->spec->resources;
    if (res && res->device == BOOST__DEVICE__VALUE__CUDA)
        return open_cuda(l, out, err);
    switch (l->plan.precision) {
    case BOOST__PRECISION__VALUE__FP32:
        *out = kernels_cpu_fp32();
        return ERR_OK;
    case BOOST__PRECISION__VALUE__BF16:
        *out = kernels_cpu_bf16();
        return ERR_OK;
    case BOOST__PRECISION__VALUE__FP64:
        *out = kernels_cpu_fp64();
        return ERR_OK;
    default:
        error_set(err, ERR_UNSUPPORTED, "run.precision of this job is not built for the CPU");
        return error_hint(err, "set run.precision to FP32, BF16 or FP64");
    }
}

/* struct comms_watch: the rank's own thread may be waiting for its device, for ever. */
static void lost(void *arg, const struct error *why)
{
    struct life *l = arg;
    if (atomic_flag_test_and_set(l->ending))
        return; /* the rank's own thread has come to its end after all, and ends the process */
    const struct rank_orders *o = l->orders;
    const Boost__AttemptStart *s = o->start;
    const struct rank_status *page = l->report.status;
    int64_t step = __atomic_load_n(&page->step, __ATOMIC_RELAXED);
    struct error told = *why, not_told;
    char last[RANK_COLLECTIVE_TEXT];
    rank_collective_text(page, last, sizeof last);
    error_context(&told, "step %" PRId64 "%s%s", step + 1, last[0] ? ", last collective: " : "", last);
    report_line(&l->report, "rank %d: %s%s%s%s", o->rank, told.message, told.hint[0] ? " (" : "", told.hint,
                told.hint[0] ? ")" : "");
    if (report_done(s->run_dir, s->job, s->attempt, o->rank, BOOST__DONE_RECORD__WHY__FAILED, step, NAN, &told,
                    &not_told))
        report_line(&l->report, "rank %d: the end cannot be recorded: %s", o->rank, not_told.message);
    o->end_process(rank_exit_code(why));
}

static void reached(void *arg, const struct comm_call *call, uint64_t seq)
{
    struct life *l = arg;
    report_reached(&l->report, call, seq);
}

static void say(void *arg, const char *line)
{
    struct life *l = arg;
    report_line(&l->report, "%s", line);
}

static int connect_processes(struct life *l, struct error *err)
{
    const struct rank_orders *o = l->orders;
    const Boost__AttemptStart *s = o->start;
    if (!s->rendezvous_socket || !s->data_address)
        return error_set(err, ERR_INVALID, "start.pb names no rendezvous socket or no data address");
    report_phase(&l->report, BOOST__RANK_UPDATE__PHASE__RENDEZVOUS);
    report_doing(&l->report, "waiting for the other ranks at the rendezvous");
    struct rendezvous_client client;
    int rc = rendezvous_open(&client, s->rendezvous_socket, s->job, s->attempt, o->rank, s->rendezvous_timeout_ms, err);
    if (!rc) {
        struct rendezvous table = rendezvous_table(&client);
        struct comm_layout layout = engine_layout(&l->plan);
        struct comms_watch watch = {.lost = lost, .reached = reached, .say = say, .arg = l};
        if (l->cuda)
            rc = l->cuda->comms_create(o->rank, &layout, s->data_address, &table, s->rendezvous_timeout_ms, &watch,
                                       &l->comms, err);
        else
            rc = gloo_comms_create(o->rank, &layout, s->data_address, &table, s->rendezvous_timeout_ms,
                                   OPERATION_TIMEOUT_MS, &l->comms, err);
    }
    rendezvous_close(&client);
    return rc;
}

/* A rank of its own needs no network. */
static int connect_alone(struct life *l, struct error *err)
{
    struct comm_layout layout = engine_layout(&l->plan);
    if (l->cuda)
        return l->cuda->comms_create(0, &layout, NULL, NULL, 0, NULL, &l->comms, err);
    int rc = local_world_create(&layout, &l->alone, err);
    return rc ? rc : local_comms_join(l->alone, 0, &l->comms, err);
}

static int connect_ranks(struct life *l, struct error *err)
{
    int rc;
    if (l->plan.world == 1)
        rc = connect_alone(l, err);
    else if (l->orders->local)
        rc = local_comms_join(l->orders->local, l->orders->rank, &l->comms, err);
    else
        rc = connect_processes(l, err);
    l->connected = !rc;
    if (rc)
        return rc;
    comms_set_note(&l->comms, report_collective, &l->report);
    return ERR_OK;
}

static int run(const struct rank_orders *o, atomic_flag *ending, struct train_end *end, struct error *err)
{
    struct life l = {.orders = o, .ending = ending};
    struct train t = {.start = o->start, .plan = &l.plan, .comms = &l.comms, .rank = o->rank, .report = &l.report};
    int rc = plan_make(o->start->spec, &l.plan, err);
    if (!rc)
        rc = check_orders(o, &l.plan, err);
    if (!rc)
        rc = choose_kernels(&l, &t.kernels, err);
    if (rc)
        goto out;
    rc = report_open(&l.report, o->start, o->rank, o->local != NULL, o->log, err);
    l.reporting = !rc;
    if (!rc && !o->local)
        stacks_serve(&l.report);
    if (!rc)
        rc = connect_ranks(&l, err);
    if (!rc)
        rc = train(&t, end, err);
    if (l.reporting)
        report_phase(&l.report, BOOST__RANK_UPDATE__PHASE__ENDED);
out:
    if (rc && o->local)
        local_world_abort(o->local, o->rank);
    if (l.connected)
        comms_destroy(&l.comms);
    if (l.alone)
        local_world_destroy(l.alone);
    if (l.reporting) {
        if (!o->local)
            stacks_serve(NULL);
        report_close(&l.report);
    }
    return rc;
}

int rank_run(const struct rank_orders *o, struct error *err)
{
    struct train_end end = {.eval_loss = NAN};
    atomic_flag ending = ATOMIC_FLAG_INIT;
    error_clear(err);
    if (!o->start->spec)
        error_set(err, ERR_INVALID, "start.pb holds no job");
    int rc = o->start->spec ? run(o, &ending, &end, err) : (int)err->code;
    while (atomic_flag_test_and_set(&ending))
        pause(); /* lost() is telling it, and ends the process */
    Boost__DoneRecord__Why why = rc            ? BOOST__DONE_RECORD__WHY__FAILED
                                 : end.stopped ? BOOST__DONE_RECORD__WHY__STOPPED
                                               : BOOST__DONE_RECORD__WHY__COMPLETED;
    struct error not_told;
    if (o->start->run_dir &&
        report_done(o->start->run_dir, o->start->job, o->start->attempt, o->rank, why, end.step,
                    o->rank == 0 ? end.eval_loss : NAN, rc ? err : NULL, &not_told) &&
        !rc) {
        *err = not_told;
        error_context(err, "the end cannot be recorded");
    }
    return rank_exit_code(err);
}
