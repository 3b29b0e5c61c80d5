#!/usr/bin/env python3
"""Restarts on a user's word and starts from another job's checkpoint, with real ranks: which losses come out."""
import json
from pathlib import Path

from harness import run, wait_until
from jobs import Shared, endless, job_of, losses, newest_committed, wait_committed

shared = Shared(agents=2, cpu_slots=2)


def first_loss(c, job, attempt=1):
    rows = losses(c, job)
    step = min(s for s in rows if attempt in rows[s])
    return step, rows[step][attempt]


def show(c, job):
    return c.json("show", job)


@shared
def test_live_job_goes_on_with_other_settings(c):
    job = c.submit(endless(c, every=20))
    wait_committed(c, job, 20)
    r = c.ctl("restart", job, "--set", "optimizer.lr=1e-9", "--set", "run.steps=100000", "--set", "name=x")
    assert r.rc == 6 and "does not rename job" in r.err, r
    r = c.ctl("restart", job, "--set", "optimizer.lrr=1e-9")
    assert r.rc != 0 and "optimizer.lr" in r.err, r
    r = c.ctl("restart", job, "--set", "data.train[0].path=nowhere.txt")
    assert r.rc == 6 and "nowhere.txt" in r.err and c.status(job)["state"] == "RUNNING", r
    out = c.ok("restart", job, "--set", "optimizer.lr=1e-9")
    assert f"job {job}: finishes its step, checkpoints" in out and "attempt 2" in out, out
    wait_until(lambda: any(2 in attempts for attempts in losses(c, job).values()), 30, "the first step of attempt 2")
    s = show(c, job)
    assert s["attempts"][1]["from_step"] == newest_committed(c, job, 1), s["attempts"]
    assert s["resolved"]["optimizer"]["lr"] == 1e-9 and s["restarts_used"] == 0, s
    assert [a["attempt"] for a in s["attempts"]] == [1, 2], s["attempts"]
    lr = [r for r in c.json("metrics", job, "--name", "lr")["metrics"] if r["attempt"] == 2]
    assert lr and all(r["lr"] <= 1e-9 for r in lr), lr
    # Back to a step that is still kept: it is replayed to the bit but for the settings.
    kept = min(k["step"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED")
    c.ok("restart", job, "--from", kept, "--set", "optimizer.lr=3e-3")
    wait_until(lambda: 3 in losses(c, job).get(kept + 1, {}), 30, "the first step of attempt 3")
    assert losses(c, job)[kept + 1][3] == next(iter(losses(c, job)[kept + 1].values())), losses(c, job)[kept + 1]
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_what_was_accepted_outlives_the_controller(c):
    job = c.submit(endless(c, name="asked", tp=2, every=20))
    wait_committed(c, job, 20)
    c.ok("restart", job, "--set", "optimizer.lr=1e-9")
    c.restart_boostd()  # the old attempt is still on its way out
    wait_until(lambda: any(2 in attempts for attempts in losses(c, job).values()), 40, "the first step of attempt 2")
    shown = show(c, job)
    assert shown["resolved"]["optimizer"]["lr"] == 1e-9 and len(shown["attempts"]) == 2, shown["attempts"]
    node = c.status(job)["nodes"][0]
    c.ok("node", "drain", node, "--reason", "over a restart", "--deadline", "3s")
    c.restart_boostd()
    wait_until(lambda: c.status(job)["nodes"] not in ([], [node]) and c.status(job)["state"] == "RUNNING", 40, "it moves")
    wait_until(lambda: c.json("node", "show", node)["node"]["admin"] == "DRAINED", 10, "drained")
    c.ok("node", "resume", node)
    wait_until(lambda: c.json("node", "show", node)["node"]["admin"] == "NONE", 20, "resumed")
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_ended_job_goes_on_as_a_new_one(c):
    constant = ("optimizer {", "optimizer { schedule: CONSTANT")  # whose rate does not depend on run.steps
    job = c.submit(job_of(c, steps=40, every=20, name="short", tp=1).replace(*constant))
    full = c.submit(job_of(c, steps=60, every=20, name="full", tp=1).replace(*constant))
    for j in (job, full):
        c.wait_state(j, "COMPLETED")
    r = c.ctl("restart", job)
    assert r.rc == 6 and "the checkpoint is of step 40 already" in r.err and "raise run.steps" in r.err, r
    answer = c.json("restart", job, "--set", "run.steps=60")
    assert answer["new_job"] and answer["id"] != job and "step 40" in answer["text"], answer
    c.wait_state(answer["id"], "COMPLETED")
    mine, whole = losses(c, answer["id"]), losses(c, full)
    assert sorted(mine) == list(range(41, 61)), sorted(mine)
    assert all(mine[s][1] == whole[s][1] for s in mine), "not the losses of the undisturbed job"


@shared
def test_weights_of_another_job_in_another_layout(c):
    job = c.submit(job_of(c, steps=60, every=20, name="base", tp=1))
    c.wait_state(job, "COMPLETED")
    path = [k["path"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k["step"] == 60][0]
    spec = job_of(c, steps=20, every=10, name="tune", tp=2)
    by_job = c.submit(spec, "--set", f"checkpoint.init_from.path=job:{job}", "--set",
                      "checkpoint.init_from.weights_only=true", "--set", "data.seed=7")
    by_path = c.submit(spec, "--set", f"checkpoint.init_from.path={path}", "--set",
                       "checkpoint.init_from.weights_only=true", "--set", "data.seed=7")
    for j in (by_job, by_path):
        c.wait_state(j, "COMPLETED")
    assert losses(c, by_job) == losses(c, by_path)
    step, loss = first_loss(c, by_job)
    _, scratch = first_loss(c, job)
    last = losses(c, job)[60][1]
    assert step == 1 and abs(loss - last) < 0.3 * (scratch - last), (loss, last, scratch)
    started = [e for e in c.events(by_job) if e["kind"] == "started"][0]["text"]
    assert f"from the weights of {path}" in started, started


@shared
def test_what_does_not_fit_is_refused(c):
    job = c.submit(job_of(c, steps=20, every=10, name="small", tp=1))
    c.wait_state(job, "COMPLETED")
    path = [k["path"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k["step"] == 20][0]
    other = job_of(c, steps=40, name="wide", tp=1, hidden=128)
    for source in (f"job:{job}", path):  # by the registry, and by the manifest that an agent reads
        spec = c.dir / "wide.pbtxt"
        spec.write_text(other)
        r = c.ctl("submit", spec, "--set", f"checkpoint.init_from.path={source}")
        assert r.rc == 6 and "model.hidden = 128, the checkpoint has 64" in r.err, (source, r)
    r = c.ctl("submit", spec, "--set", f"checkpoint.init_from.path={c.dir}/ckpt/nowhere/step-5.a1")
    assert r.rc == 6 and "nowhere" in r.err, r
    r = c.ctl("submit", spec, "--set", "checkpoint.init_from.path=job:999")
    assert r.rc == 6 and "no job 999" in r.err, r
    r = c.ctl("restart", job, "--set", "run.steps=40", "--set", "checkpoint.init_from.path=job:999")
    assert r.rc == 6 and "from its own checkpoint, not from job:999" in r.err and "boostctl submit" in r.err, r


@shared
def test_another_function_of_the_same_shapes_is_refused(c):
    job = c.submit(job_of(c, steps=20, every=10, name="same", tp=1))
    c.wait_state(job, "COMPLETED")
    path = [k["path"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k["step"] == 20][0]
    exported = c.dir / "same-hf"
    c.ok("ckpt", "export", job, exported)
    spec = c.dir / "same.pbtxt"
    spec.write_text(job_of(c, steps=30, name="other", tp=1))
    changes = ["--set", "model.rope_theta=500", "--set", "model.norm_eps=0.1", "--set", "model.mlp_activation=ON"]
    for source, weights_only in ((f"job:{job}", 0), (path, 0), (f"job:{job}", 1), (path, 1), (exported, 1)):
        begin = ["--set", f"checkpoint.init_from.path={source}"]
        begin += ["--set", "checkpoint.init_from.weights_only=true"] * weights_only
        r = c.ctl("submit", spec, *begin, *changes)
        assert r.rc == 6, (source, r)
        for words in ("model.rope_theta = 500, the checkpoint has 10000", "model.norm_eps = 0.1, the checkpoint has 1e-06",
                      "model.mlp_activation = ON, the checkpoint has OFF", "--set model.rope_theta=10000"):
            assert words in r.err, (source, words, r)
        assert ("change config.json" in r.err) == bool(weights_only), (source, r)
    r = c.ctl("restart", job, "--set", "run.steps=30", *changes)
    assert r.rc == 6 and "model.norm_eps = 0.1, the checkpoint has 1e-06" in r.err, r
    # Where it is meant: the weights' own description is changed.
    config = json.loads((exported / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 500
    assert config["rms_norm_eps"] == 1e-6
    config["rms_norm_eps"] = 9.999999974752427e-07  # as a program writes it that keeps it in fp32
    (exported / "config.json").write_text(json.dumps(config))
    longer = c.submit(job_of(c, steps=2, name="longer", tp=1), "--set", f"checkpoint.init_from.path={exported}", "--set",
                      "checkpoint.init_from.weights_only=true", "--set", "model.rope_theta=500")
    c.wait_state(longer, "COMPLETED")


@shared
def test_live_job_changes_neither_its_model_nor_where_it_began(c):
    job = c.submit(endless(c, name="lives", tp=1))
    c.wait_state(job, "RUNNING")
    for change, words in (("model.rope_theta=500", "model.rope_theta = 500, the checkpoint has 10000"),
                          ("run.seed=5", "run.seed = 5, the weights were drawn with 1"),
                          ("checkpoint.init_from.path=job:999", "no job 999")):
        r = c.ctl("restart", job, "--set", change)
        assert r.rc == 6 and words in r.err, (change, r)
    assert c.status(job)["state"] == "RUNNING" and len(show(c, job)["attempts"]) == 1, show(c, job)
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_data_that_changed_underneath_is_told(c):
    job = c.submit(endless(c, name="cut", tp=1))
    data = Path(show(c, job)["resolved"]["data"]["train"][0]["path"])
    warnings = lambda: [e for e in c.events(job) if e["kind"] == "warning"]
    c.wait_state(job, "RUNNING")
    c.ok("hold", job)
    c.wait_state(job, "HELD")
    c.ok("release", job)  # the same data: nothing to tell
    wait_until(lambda: any(2 in attempts for attempts in losses(c, job).values()), 30, "the first step of attempt 2")
    assert not warnings(), warnings()
    c.ok("hold", job)
    c.wait_state(job, "HELD")
    whole = data.read_bytes()
    windows = lambda n: (n - 1) // 64
    data.write_bytes(whole[:len(whole) // 2])
    c.ok("release", job)
    wait_until(lambda: any(3 in attempts for attempts in losses(c, job).values()), 30, "the first step of attempt 3")
    wait_until(warnings, 10, "the event")
    told, = warnings()
    step = show(c, job)["attempts"][2]["from_step"]
    for words in (f"not that of the checkpoint of step {step}: data.train[0] ({data}) has {len(whole) // 2} tokens in "
                  f"{windows(len(whole) // 2)} windows, it had {len(whole)} in {windows(len(whole))}",
                  f"put the data back and restart from step {step}"):
        assert words in told["text"], told
    assert told["actor"] == "rank 0" and told["attempt"] == 3, told
    assert "warning: the training data is not that of" in c.ok("logs", job), c.ok("logs", job)
    # What a restart asks for itself is told too: the order is another from there on.
    data.write_bytes(whole)
    c.ok("restart", job, "--from", step, "--set", "data.seq_len=32")
    wait_until(lambda: len(warnings()) > 1, 30, "the second event")
    assert "data.seq_len is 32, it was 64" in warnings()[1]["text"], warnings()
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_drained_node_gives_its_job_to_another(c):
    job = c.submit(endless(c, name="moves", tp=2))
    c.wait_state(job, "RUNNING")
    node = c.status(job)["nodes"][0]
    other = "n2" if node == "n1" else "n1"
    r = c.ctl("node", "drain", node)
    assert r.rc == 2 and "needs --reason" in r.err, r
    out = c.ok("node", "drain", node, "--reason", "new kernel", "--deadline", "1s")
    assert f"node {node}: takes no new work; 1 job there, in 1 s its jobs checkpoint and are queued again" in out, out
    wait_until(lambda: c.status(job)["nodes"] == [other] and c.status(job)["state"] == "RUNNING", 30,
               "it runs on the other")
    assert show(c, job)["attempts"][1]["from_step"] == newest_committed(c, job, 1) > 0
    wait_until(lambda: c.json("node", "show", node)["node"]["admin"] == "DRAINED", 10, "drained")
    assert "new kernel" in c.ok("node", "show", node)
    c.ok("node", "resume", node)
    admin = c.json("node", "show", node)["node"]["admin"]
    assert admin in ("NONE", "CORDONED"), admin  # until its health check has passed
    wait_until(lambda: c.json("node", "show", node)["node"]["admin"] == "NONE", 20, "resumed")
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


test_nothing_is_left = shared.last

run(globals())
