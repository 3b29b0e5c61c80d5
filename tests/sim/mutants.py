"""Bugs to plant in the controller, one at a time, each beside an invariant of the simulator.

(name, file, text, what stands there instead, invariant, or "" for any). The text stands once in the file: where it
no longer does, the code has changed and the bug has to be planted anew, not dropped (it is skipped until then, and more
than a few of these are a failure).
"""
MUTANTS = [
    # One live attempt a device.
    ("next-attempt-beside-the-old", "daemon/core_picture.c", "if (old) {", "if (false) {",
     "one live attempt a device"),
    ("end-unconfirmed", "daemon/core_ending.c",
     "if (!a->parts[p].gone && !a->parts[p].lost)", "if (!a->kill && !a->parts[p].gone && !a->parts[p].lost)", ""),
    ("lost-not-fenced", "daemon/core_attempts.c", "a->fenced = true;", "", ""),
    # Acknowledged submits survive.
    ("submit-acknowledged-early", "daemon/core_submit.c", "after_durable_or_late(c, submitted, submit_late, s, submit_free);",
     "submitted(c, s, ERR_OK, NULL);\n    submit_free(s);\n    (void)submit_late;", "acknowledged submits survive"),
    ("refused-submit-runs", "daemon/core_submit.c", "else if (s->replied)", "else if (false)", "what was refused never runs"),
    # Attempts only increase, and no order before its row.
    ("attempts-forgotten-at-boot", "daemon/core_boot.c", "if (!job || row->attempt != job->n_attempts + 1) {",
     "if (job && row->end_ns)\n        return;\n    if (!job || row->attempt != job->n_attempts + 1) {", ""),
    ("order-before-row", "daemon/core_place.c", "&& a->start_durable", "", "rows before orders"),
    ("start-again-what-ran", "daemon/core_agents.c",
     "} else if (job->state == STATE(STARTING) && !part->heard && !a->kill) {", "} else if (!a->kill) {", ""),
    # Terminal states are final.
    ("ended-is-released", "daemon/job_table.c", "{HELD, 0, EV_RELEASE, QUEUED, KEEP, ACT_SCHEDULE},",
     "{HELD, 0, EV_RELEASE, QUEUED, KEEP, ACT_SCHEDULE},\n    {CANCELLED, 0, EV_RELEASE, QUEUED, KEEP, ACT_SCHEDULE},",
     "terminal states are final"),
    # Cancel ends every process.
    ("cancel-without-stop", "daemon/job_table.c", "{RUNNING, 0, EV_CANCEL, STOPPING, CANCELLED, ACT_STOP_TERM},",
     "{RUNNING, 0, EV_CANCEL, STOPPING, CANCELLED, ACT_NONE},", "cancel ends every process"),
    ("stop-without-end", "daemon/core_attempts.c", "if (a->grace_due && now >= a->grace_due && !a->kill) {", "if (false) {",
     ""),
    # No node over-committed.
    ("one-more-than-there-is", "daemon/core_nodes.c", "int slots = node_slots(n, pool) - node_busy(n, pool);",
     "int slots = node_slots(n, pool) - node_busy(n, pool) + (n->n_holdings > 0);", "no node over-committed"),
    ("gpus-not-counted", "daemon/core_nodes.c", "slots += n->holdings[i].pool == pool ? n->holdings[i].slots : 0;",
     "slots += n->holdings[i].pool == pool && pool == SCHED_CPU ? n->holdings[i].slots : 0;", ""),
    ("lost-is-free", "daemon/core_attempts.c", "if (!lost && n)\n        node_release", "if (n)\n        node_release",
     ""),
    ("holdings-forgotten-at-boot", "daemon/core_boot.c", "node_hold(n, job->id, a->number,", "(void)(job->id, a->number,", ""),
    ("spares-outlive-the-job", "daemon/core_jobs.c", "        spares_release(c, job);", "        ;", ""),
    # Resume only from committed checkpoints.
    ("resume-from-writing", "daemon/core_checkpoints.c",
     "return k->state == CKPT(COMMITTED) && !k->damaged && !k->aside;",
     "return checkpoint_whole(k) && !k->damaged && !k->aside;",
     "resume only from committed checkpoints"),
    ("committed-without-manifest", "daemon/core_ckpt_files.c",
     "    if (rc == ERR_OK) {\n        checkpoint_commit(", "    if (rc != ERR_TIMEOUT) {\n        checkpoint_commit(",
     "resume only from committed checkpoints"),
    ("deleted-before-row", "daemon/core_ckpt_files.c", "    if (job->unsettled || job->dirty)\n        return; /* rows first, those of the open change too */\n", "",
     ""),
    # What is shown is durable.
    ("shown-before-durable", "daemon/core_show.c", "    x->state = k->durable.state;", "    x->state = k->state;",
     "what is shown is durable"),
    ("last-step-before-durable", "daemon/core_show.c", "    s->last_checkpoint_step = checkpoints_durable_step(job);",
     "    s->last_checkpoint_step = job->checkpoint_step;", "what is shown is durable"),
    ("end-before-durable", "daemon/core_show.c", "    s->state = job_shown_state(job);", "    s->state = job->state;",
     "what is shown is durable"),
    # A node out of use gets nothing new.
    ("closed-is-open", "daemon/core_picture.c", ".open = node->admin == ADMIN(NONE),", ".open = true,",
     "a node out of use gets nothing new"),
    ("sick-is-open", "daemon/core_health.c", "if (failing(n->health)) {", "if (false && failing(n->health)) {",
     "a node out of use gets nothing new"),
    ("operators-cordon-lost", "daemon/core_drain.c", "if (theirs || n->admin == ADMIN(DRAINING))", "if (n->admin == ADMIN(DRAINING))",
     "a node out of use gets nothing new"),
    # Limits hold.
    ("array-without-limit", "daemon/core_picture.c", "if (!first || running < job->array_limit)", "if (true)", "limits hold"),
    ("user-without-limit", "daemon/core_queue.c", " || limit_keeps(c, job, text, sizeof answer.text))", ")",
     "limits hold"),
    # A node that is heard is never DOWN.
    ("grace-forgotten", "daemon/core_nodes.c", "if (down < c->up_since + c->restart_grace_ns)", "if (false)",
     "a node that is heard is never DOWN"),
    ("heard-unless-suspect", "daemon/core_nodes.c", "n->last_seen = now_mono(c);",
     "if (n->liveness == LIVENESS(UP))\n        n->last_seen = now_mono(c);", "a node that is heard is never DOWN"),
    # Events replay to the job table.
    ("end-without-event", "daemon/core_ending.c", "    attempt_say_end(c, job, a->number);\n}", "}",
     "events replay to the job table"),
    ("row-before-event", "daemon/core_jobs.c", "    mark_job(c, job);\n    if (job->state == STATE(STOPPING)",
     "    mark_job(c, job);\n    change_commit(c);\n    if (job->state == STATE(STOPPING)", ""),
    # Jobs finish, devices come free, agents may forget.
    ("back-off-for-ever", "daemon/core_attempts.c", "job->backoff_due = 0;\n        job_fire(c, job, EV_BACKOFF_OVER);",
     "job_fire(c, job, EV_BACKOFF_OVER);", ""),
    ("kill-never-overdue", "daemon/core_nodes.c", "    h->kill_due = h->kill_from + c->kill_confirm_ns;",
     "    h->kill_due = 0;", ""),
    ("drained-for-ever", "daemon/core_nodes.c", "    if (overdue)\n        node_undrain(c, n);", "    (void)overdue;", ""),
    ("never-forgotten", "daemon/core_ending.c", "        send_forget(c, n, job->id, a->number);\n", "", "agents may forget"),
    # No illegal transition.
    ("row-missing", "daemon/job_table.c", "    {STOPPING, ANY_TARGET, EV_FAILED_INFRA, STOPPING, KEEP, ACT_KILL},\n", "",
     "no illegal transition"),
]
