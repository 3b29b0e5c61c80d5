#!/usr/bin/env python3
# time limit: 240 s
"""boostctl against a real cluster: output and exit code of every command, and what the commands do to jobs."""
import json, os, re, shutil, signal, subprocess, time
from pathlib import Path

from harness import BIN, ROOT, run, tiny_job, wait_until
from jobs import Shared, attempts, ended, endless, job_of, newest_committed, same_losses, twin_of, wait_rank_step

shared = Shared(cpu_slots=2)
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
STEPS = 150


def fails(c, rc, says, *args, **kw):
    r = c.ctl(*args, **kw)
    assert r.rc == rc, f"{args}: status {r.rc} instead of {rc}\n{r.out}{r.err}"
    for text in [says] if isinstance(says, str) else says:
        assert text in r.err, f"{args}: '{text}' is not in\n{r.err}"
    assert r.out == "", f"{args}: data on stdout: {r.out}"


def done_job(c):
    """A finished job that the tests of looking share."""
    found = [j for j in c.json("status", "-a")["jobs"] if j["name"] == "finished"]
    if found:
        return found[0]["id"]
    job = c.submit(tiny_job(c, tp=2, name="finished").replace("eval_tokens", "eval_every: 10 eval_tokens").replace("keep: 3", "keep: 1"))
    c.wait_state(job, "COMPLETED")
    return job


def running(c, job):
    c.wait_state(job, "RUNNING")
    return c.rank_pids(job, c.status(job)["attempt"])


def cancel_now(c, *jobs):
    c.ok("cancel", "--now", "-y", *jobs)
    for job in jobs:
        c.wait_state(job, "CANCELLED", deadline=15)


# ---- submitting ----------------------------------------------------------------------


@shared
def test_submit(c):
    path = c.dir / "one.pbtxt"
    path.write_text(tiny_job(c, tp=2, name="one"))
    out = c.ok("submit", path)
    m = re.fullmatch(r"job (\d+) queued: one \(1 node x 2 devices, priority 50\)  \[text spec\]\n", out)
    assert m, out
    c.wait_state(int(m[1]), "COMPLETED")
    answer = json.loads(c.ok("-o", "json", "submit", path, "--set", "name=two"))
    assert answer["schema"] == "boost.submit/1" and answer["name"] == "two" and answer["devices_per_node"] == 2, answer
    assert re.fullmatch(r"\d+\n", c.ok("submit", path, "--parsable", "--set", "name=three"))
    assert re.fullmatch(r"\d+\n", c.ok("-o", "name", "submit", path, "--set", "name=four"))
    c.ok("encode", path, "-O", c.dir / "one.pb")
    assert "[binary spec]" in c.ok("submit", c.dir / "one.pb", "--hold")
    (c.dir / "one.json").write_text(c.ok("decode", "--to", "json", path))
    assert c.ok("-o", "json", "decode", path) == (c.dir / "one.json").read_text()
    assert "[json spec]" in c.ok("submit", c.dir / "one.json", "--hold")
    text = path.read_text()
    assert "[text spec]" in c.ctl("submit", "-", "--hold", input=text).out
    held = c.json("status", "-s", "H")["jobs"]
    assert len(held) == 3 and all(j["state"] == "HELD" and j["reason"] == "Held" for j in held), held
    c.ok("cancel", "-y", *[j["id"] for j in held])


@shared
def test_output_that_cannot_be_written(c):
    for args in (["status"], ["-o", "json", "node", "ls"], ["help"], ["status", "--help"]):
        with open("/dev/full", "w") as full:
            p = subprocess.run([BIN / "boostctl", *args], env=c.env, stdout=full, stderr=subprocess.PIPE, text=True)
        assert p.returncode == 5 and "could not be written: No space left" in p.stderr, (args, p)
    p = subprocess.run(f"{BIN}/boostctl help | head -1 >/dev/null; exit $?", shell=True, env=c.env, capture_output=True)
    assert p.returncode == 0 and p.stderr == b"", p  # a pager that was closed is no failure to tell of
    path = c.dir / "unprinted.pbtxt"
    path.write_text(tiny_job(c, name="unprinted"))
    with open("/dev/full", "w") as full:
        p = subprocess.run([BIN / "boostctl", "submit", path, "--parsable", "--hold"], env=c.env, cwd=c.dir,
                           stdout=full, stderr=subprocess.PIPE, text=True)
    held, = [j["id"] for j in c.json("status", "-s", "H")["jobs"] if j["name"] == "unprinted"]
    assert p.returncode == 5 and f"submitted as job {held}, though" in p.stderr and "No space left" in p.stderr, p
    for args, killed in ((["status", "-a"], True), (["wait", held, "--follow"], True), (["status", "-a"], False)):
        read, write = os.pipe()
        os.close(read)
        p = subprocess.run([BIN / "boostctl", *map(str, args)], env=c.env, stdout=write, stderr=subprocess.PIPE,
                           text=True, timeout=30, restore_signals=killed)  # else it is ignored, as Python has it
        os.close(write)
        assert (p.returncode, p.stderr) == (-signal.SIGPIPE, "") if killed else \
            p.returncode == 5 and "Broken pipe" in p.stderr, (args, p)
    c.ok("cancel", held)


@shared
def test_submit_wait_and_follow(c):
    path = c.dir / "wait.pbtxt"
    path.write_text(tiny_job(c, name="waited"))
    assert c.ok("submit", path, "--wait", "--parsable").strip().isdigit()
    out = c.ok("submit", path, "--follow", "--set", "name=followed")
    lines = out.splitlines()
    assert re.match(r"job \d+ queued: followed", lines[0]), out
    assert re.match(r"job \d+ COMPLETED after .*: step 20/20, loss \d[^;]*; 1 attempt$", lines[-1]), out
    assert lines[-1].count("eval loss") <= 1, out
    assert any(x.startswith("started: ") for x in lines) and any(x.startswith("completed: ") for x in lines), out
    assert "\033" not in out and "\r" not in out, "colour or a progress display, and no terminal"
    first, *events, last = [json.loads(x) for x in c.ok("-o", "json", "submit", path, "--follow").splitlines()]
    assert first["schema"] == "boost.submit/1" and last["schema"] == "boost.wait/1", (first, last)
    assert [(j["id"], j["state"]) for j in last["jobs"]] == [(first["id"], "COMPLETED")], last
    assert {e["job"] for e in events} == {first["id"]}, events
    assert {"started", "completed"} <= {e["kind"] for e in events}, events


@shared
def test_dry_run(c):
    path = c.dir / "dry.pbtxt"
    path.write_text(tiny_job(c, tp=2, name="dry"))
    r = c.ctl("submit", path, "--dry-run")
    assert r.rc == 0 and "norm: ONLINE" in r.out and "precision: FP32" in r.out and "would start now" in r.err, r
    assert not any(j["name"] == "dry" for j in c.json("status", "-a")["jobs"])
    blocker = c.submit(endless(c))
    running(c, blocker)
    r = c.ctl("submit", path, "-n")
    assert r.rc == 10 and "needs 2 devices, 1 of 2 free" in r.err, r
    r = c.ctl("-o", "json", "submit", path, "-n")
    answer = json.loads(r.out)
    assert r.rc == 10 and answer["schema"] == "boost.dry_run/1" and answer["would_wait"] is True, r
    assert answer["resolved"]["parallel"]["tp"] == 2, answer
    cancel_now(c, blocker)


@shared
def test_more_threads_than_any_node_has_cores(c):
    path, cores = c.dir / "threads.pbtxt", len(os.sched_getaffinity(0))
    path.write_text(tiny_job(c, name="threads"))
    for how in ((), ("--dry-run",)):
        r = c.ctl("submit", path, *how, "--set", f"resources.threads_per_rank={cores + 1}")
        assert r.rc == 6 and f"threads_per_rank = {cores + 1}: no node has so many cores" in r.err, r
        assert f"n1 has most, {cores}" in r.err and f"1 to {cores}" in r.err, r
    r = c.ctl("validate", path, "--set", "resources.threads_per_rank=4096")
    assert r.rc == 6 and "resources.threads_per_rank" in r.err and "0 to 1024" in r.err, r
    assert not any(j["name"] == "threads" for j in c.json("status", "-a")["jobs"])


# ---- looking ---------------------------------------------------------------------------


@shared
def test_status_tables(c):
    job = done_job(c)
    live = c.submit(endless(c, name="live"))
    running(c, live)
    c.wait_step(live, 3)
    lines = c.ok("status").splitlines()
    assert lines[0].split() == ["JOB", "NAME", "ST", "STEP", "LOSS", "TOK/S", "ATT", "DEV", "TIME", "INFO"], lines
    row = lines[1].split()
    assert row[0] == str(live) and row[1:3] == ["live", "R"] and re.fullmatch(r"\d+/1000000", row[3]), lines
    assert float(row[4]) > 0 and row[6:8] == ["1", "1"] and row[9] == "n1", lines
    assert lines[-1] == "1 running | nodes 1 up | devices 1/2 busy", lines
    assert len(lines) == 3, "ended jobs only with -a"
    every = c.ok("status", "-a")
    assert re.search(rf"^ +{job}  finished  +CD  +20/20 ", every, re.M), every
    wide = c.ok("-o", "wide", "status", live).splitlines()
    assert wide[0].split()[9:] == ["MFU", "USER", "PRIO", "CKPT", "SUBMITTED", "INFO"], wide
    assert "n/a" in wide[1], wide  # nobody has said what a core can do
    assert RFC3339.search(wide[1]), wide
    assert c.ok("-o", "name", "status").split() == [str(live)]
    cancel_now(c, live)


@shared
def test_status_json(c):
    job = done_job(c)
    answer = c.json("status", job)
    assert answer["schema"] == "boost.status/1" and len(answer["jobs"]) == 1, answer
    row = answer["jobs"][0]
    types = {"id": int, "name": str, "state": str, "reason": str, "info": str, "step": int, "steps": int,
             "loss": float, "eval_loss": float, "attempt": int, "devices": int, "nodes": list, "elapsed_s": float,
             "last_checkpoint_step": int, "submitted": str, "ended": str, "user": str, "priority": int, "restarts": int}
    for key, kind in types.items():
        assert type(row.get(key)) is kind, f"{key} is {row.get(key)!r}, not {kind.__name__}: {row}"
    assert (row["state"], row["reason"], row["step"], row["steps"]) == ("COMPLETED", "", 20, 20), row
    assert row["devices"] == 2 and row["last_checkpoint_step"] == 20, row
    assert RFC3339.fullmatch(row["submitted"]) and row["submitted"] <= row["ended"], row
    held = c.submit(tiny_job(c, name="not-begun"), "--hold")
    fresh = c.status(held)
    assert not {"step", "loss", "attempt", "last_checkpoint_step", "ended"} & set(fresh), f"unknown is absent: {fresh}"
    lines = [json.loads(x) for x in c.ok("-o", "jsonl", "status", "-a").splitlines()]
    assert {x["id"] for x in lines} >= {job, held} and all("schema" not in x for x in lines), lines
    c.ok("cancel", held)


@shared
def test_status_filters(c):
    job = done_job(c)
    held = [c.submit(tiny_job(c, name=f"filter-{i}"), "--hold") for i in range(3)]
    assert [j["id"] for j in c.json("status", "-s", "HELD")["jobs"]] == held
    assert job in [j["id"] for j in c.json("status", "-s", "H,CD")["jobs"]]
    assert [j["id"] for j in c.json("status", "-N", "2", "-s", "H")["jobs"]] == held[1:]
    assert job in [j["id"] for j in c.json("status", "--since", "1h")["jobs"]]
    wait_until(lambda: [j["id"] for j in c.json("status", "--since", "1s")["jobs"]] == held, 5, "live ones alone")
    assert [j["id"] for j in c.json("status", "--me")["jobs"]] == held
    assert c.json("status", "-u", "nobody")["jobs"] == []
    fails(c, 2, "'NOPE' is no state", "status", "-s", "NOPE")
    fails(c, 2, "--since", "status", "--since", "yesterday")
    watch = c.popen_ctl("status", "-w", "0.2")
    try:
        heads = 0
        for line in watch.stdout:
            heads += line.lstrip().startswith("JOB")
            if heads == 3:
                break
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=10)
        assert watch.returncode == 130, watch.returncode
    finally:
        watch.kill()
    c.ok("cancel", "-y", *held)


@shared
def test_show(c):
    job = done_job(c)
    def gone():
        *old, newest = [k["state"] for k in c.json("ckpt", "ls", job, "-a")["checkpoints"]]
        return len(old) if old and newest == "COMMITTED" and set(old) <= {"DELETED", "ABANDONED"} else None
    n = wait_until(gone, 10, "keep: 1; the others are deleted")
    text = c.ok("show", job)
    for part in (f"job {job}  finished", "state        COMPLETED", "step         20/20  loss ", "attempts\n", "checkpoints\n",
                 "COMMITTED", "goodput ", "last events\n", "resolved spec\n", "norm: ONLINE"):
        assert part in text, f"'{part}' is not in\n{text}"
    text = text[text.index("checkpoints\n"):text.index("goodput ")]
    assert "DELETED" not in text and f"{n} deleted or given up: boostctl ckpt ls -a {job}\n" in text, text
    answer = c.json("show", job)
    assert len(answer["checkpoints"]) == n + 1, answer["checkpoints"]
    assert answer["schema"] == "boost.show/1" and answer["job"]["id"] == job, answer
    assert answer["spec"]["name"] == "finished" and "norm" not in answer["spec"]["parallel"], answer["spec"]
    assert answer["resolved"]["parallel"]["norm"] == "ONLINE" and answer["resolved"]["run"]["precision"] == "FP32"
    one, = answer["attempts"]
    assert (one["attempt"], one["from_step"], one["to_step"], one["nodes"]) == (1, 0, 20, ["n1"]), one
    assert RFC3339.fullmatch(one["start"]) and one["start"] <= one["end"], one
    assert answer["goodput"]["productive_s"] > 0 and answer["waits"] == [], answer
    fails(c, 2, [f"{job}.1 is one attempt of it", f"logs {job}.1"], "show", f"{job}.1")


@shared
def test_steps_done_before_are_said_to_be_repeated(c):
    job = c.submit(tiny_job(c, steps=100000, every=0, tp=1, name="again", hidden=64, batch=8))
    c.ok("wait", job, "--for=step>=500", "--timeout", "90s")
    os.kill(c.rank_pids(job, 1)[0], signal.SIGKILL)
    found = wait_until(lambda: re.search(r"n1; repeats step (\d+)\n", c.ok("status", job)), 30, "status says it")
    assert 0 < int(found[1]), found
    assert re.search(r"\nstep         \d+/100000  repeats \d+  loss ", c.ok("show", job))
    cancel_now(c, job)


@shared
def test_show_of_a_waiting_job_says_why_once(c):
    job = c.submit(tiny_job(c, tp=4, name="never"))
    info = c.status(job)["info"]
    text = c.ok("show", job)
    assert "devices" in info and text.count(info) == 1, text
    assert re.search(r"waiting for\n +devices, .* so far", text), text
    c.ok("cancel", job)


@shared
def test_events(c):
    job = done_job(c)
    answer = c.json("events", job)
    assert answer["schema"] == "boost.events/1", answer
    kinds = [e["kind"] for e in answer["events"]]
    order = [kinds.index(k) for k in ("submitted", "started", "running", "completed")]
    assert order == sorted(order), kinds
    assert all(e["job"] == job and e["text"] and e["actor"] and RFC3339.fullmatch(e["time"]) for e in answer["events"])
    ids = [e["id"] for e in answer["events"]]
    assert ids == sorted(set(ids)), ids
    text = c.ok("events", job).splitlines()
    assert len(text) == len(kinds) and all(RFC3339.match(x) for x in text), text
    assert c.ok("events", job, "-f").splitlines() == text, "a follow of an ended job ends at once"
    assert len(c.json("events")["events"]) > len(kinds)
    live = c.submit(tiny_job(c, name="events-followed"))
    follow = c.popen_ctl("-o", "jsonl", "events", live, "-f")
    out, _ = follow.communicate(timeout=60)
    assert follow.returncode == 0 and [json.loads(x)["kind"] for x in out.splitlines()][-1] == "completed", out


@shared
def test_metrics(c):
    job = done_job(c)
    answer = c.json("metrics", job)
    assert answer["schema"] == "boost.metrics/1", answer
    rows = answer["metrics"]
    trained = [r for r in rows if "loss" in r]
    assert [r["step"] for r in trained] == list(range(1, 21)), [r["step"] for r in rows]
    for key in ("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_ms", "comm_ms", "data_ms", "skipped"):
        assert all(isinstance(r.get(key), (int, float)) for r in trained), f"{key}: {trained[-1]}"
    assert trained[-1]["tokens"] == 20 * 2 * 32, trained[-1]
    assert {r["step"] for r in rows if "eval_loss" in r} >= {10, 20}, "evaluations"
    csv = c.ok("metrics", job, "-o", "csv").splitlines()
    assert csv[0].startswith("attempt,step,loss,eval_loss,lr,grad_norm,tokens"), csv[0]
    by_step = {int(x.split(",")[1]): x.split(",")[2] for x in csv[1:] if x.split(",")[2]}
    assert {s: float(x) for s, x in by_step.items()} == {r["step"]: r["loss"] for r in trained}
    csv = c.ok("metrics", job, "-o", "csv", "--name", "lr,loss").splitlines()
    assert csv[0] == "attempt,step,lr,loss" and len(csv) >= 21, csv
    plot = c.ok("metrics", job, "--plot")
    assert "loss" in plot and len(plot.splitlines()) > 10, plot
    assert re.search(r"^attempt 1  step 20 +loss ", c.ok("metrics", job, "--name", "loss"), re.M)
    assert c.json("metrics", job, "--rank", "1")["metrics"], "timings of rank 1"
    # What is not there is said, and only that; the data stays data.
    r = c.ctl("metrics", job, "--name", "nonsense,loss")
    assert r.rc == 0 and "no nonsense" in r.err and "no loss" not in r.err and r.out.count(" loss ") == 20, r
    r = c.ctl("metrics", job, "--name", "nonsense")
    assert r.rc == 0 and "no nonsense" in r.err and r.out == "", r
    fails(c, 4, f"job {job} has ranks 0 to 1", "metrics", job, "--rank", "2")
    fails(c, 4, f"attempt 1 of job {job} has ranks 0 to 1", "metrics", f"{job}.1", "--rank", "99")
    r = c.ctl("metrics", job, "--rank", "1", "--plot")
    assert r.rc == 0 and f"rank 1 of job {job} has reported no loss" in r.err and r.out == "", r
    held = c.submit(tiny_job(c, name="metrics-held"), "--hold")
    assert c.ctl("metrics", held, "--name", "loss").rc == 0, "it has none yet"
    r = c.ctl("-o", "json", "metrics", held)
    assert r.rc == 0 and f"rank 0 of job {held} has reported no metrics" in r.err and json.loads(r.out)["metrics"] == [], r
    assert c.ctl("-q", "metrics", held).err == "" and c.ctl("metrics", job).err == ""
    c.ok("cancel", held)
    live = c.submit(tiny_job(c, name="metrics-followed"))
    follow = c.popen_ctl("-o", "jsonl", "metrics", live, "-f", "--name", "loss")
    out, _ = follow.communicate(timeout=60)
    assert follow.returncode == 0, out
    assert [r["step"] for r in map(json.loads, out.splitlines()) if "loss" in r] == list(range(1, 21)), out


@shared
def test_logs(c):
    job = done_job(c)
    text = c.ok("logs", job)
    assert "step 1/20 loss" in text and "step 20/20 loss" in text, text
    assert c.ok("logs", job, "--tail", "2").splitlines() == text.splitlines()[-2:]
    assert c.ok("logs", job, "--tail", "0") == ""
    assert c.ok("logs", f"{job}.1/0") == text and c.ok("logs", f"{job}.1") == text
    assert c.ok("logs", job, "--rank", "1") == "", "rank 0 alone has something to say"
    assert c.ok("logs", job, "-f") == text, "a follow of an ended job ends"
    fails(c, 4, "rank", "logs", job, "--rank", "2")
    fails(c, 4, "attempt", "logs", job, "--attempt", "2")
    assert c.ok("logs", job, "--node", "n1") == "".join(f"rank 0: {line}\n" for line in text.splitlines())
    assert c.ok("logs", job, "--since", "1h") == text and c.ok("logs", job, "--since", "2020-01-01T00:00:00Z") == text
    wait_until(lambda: c.ok("logs", job, "--since", "2099-01-01T00:00:00.5") == "", 10, "the times of a log, a second behind it")
    fails(c, 4, "no rank of attempt 1", "logs", job, "--node", "n9")
    fails(c, 2, "not both", "logs", job, "--node", "n1", "--rank", "1")
    fails(c, 2, "not both", "logs", job, "--tail", "1", "--since", "1m")
    fails(c, 2, "'yesterday'", "logs", job, "--since", "yesterday")


@shared
def test_logs_follow_across_a_restart(c):
    job = c.submit(job_of(c, steps=STEPS, every=40, name="logged"))
    follow = c.popen_ctl("logs", job, "-f", stderr=-1)
    try:
        wait_rank_step(c, job, 1, 60)
        os.kill(c.rank_pids(job, 1)[0], signal.SIGKILL)
        out, err = follow.communicate(timeout=90)
    finally:
        follow.kill()
    assert follow.returncode == 0 and "attempt 2" in err, err
    assert c.wait_state(job, "COMPLETED")["attempt"] == 2
    first, second = c.ok("logs", f"{job}.1"), c.ok("logs", f"{job}.2")
    assert out == first + second, "the follow shows both attempts whole"
    assert "step 1/150" in first and "step 150/150" in second, second
    # An attempt is honoured where rows of several lie side by side.
    rows = c.json("metrics", job)["metrics"]
    for attempt in (1, 2):
        of = c.json("metrics", f"{job}.{attempt}")["metrics"]
        assert of and of == [r for r in rows if r["attempt"] == attempt], (attempt, of[:2])
    assert {r["attempt"] for r in rows} == {1, 2}
    assert c.ok("metrics", f"{job}.1", "-f").count("\n") == len([r for r in rows if r["attempt"] == 1])
    fails(c, 4, "no attempt 3", "metrics", f"{job}.3")
    kept = c.json("ckpt", "ls", job, "-a")["checkpoints"]
    for attempt in (1, 2):
        of = c.json("ckpt", "ls", f"{job}.{attempt}", "-a")["checkpoints"]
        assert of and of == [k for k in kept if k["attempt"] == attempt], (attempt, of)
    fails(c, 4, "no attempt 3", "ckpt", "ls", f"{job}.3")


@shared
def test_checkpoints_and_nodes(c):
    job = done_job(c)
    lines = c.ok("ckpt", "ls", job).splitlines()
    assert lines[0].split()[:7] == ["STEP", "ATT", "STATE", "SHARDS", "SIZE", "SINCE", "PATH"], lines
    answer = c.json("ckpt", "ls", job)
    assert answer["schema"] == "boost.checkpoints/1" and answer["job"] == job, answer
    live = [k for k in answer["checkpoints"] if k["state"] == "COMMITTED"]
    assert [k["step"] for k in live] == [20] and answer["checkpoints"] == live, f"keep: 1; what is gone is not shown: {answer}"
    gone = wait_until(lambda: [k for k in c.json("ckpt", "ls", job, "-a")["checkpoints"] if k["state"] == "DELETED"], 10,
                      "deleted ones with -a")
    assert gone[0]["step"] == 5 and not any(os.path.exists(k["path"]) for k in gone if k["path"]), gone
    for k in live:
        assert k["shards"] == k["world"] == 2 and k["bytes"] > 0, k
        files = sorted(os.listdir(k["path"]))
        assert "manifest.json" in files and sum(f.endswith(".safetensors") for f in files) == 2, files
        assert re.fullmatch(rf"{re.escape(str(c.dir))}/ckpt/[0-9a-f]{{8}}-{job}/step-{k['step']}\.a1", k["path"]), k
    assert os.listdir(os.path.dirname(live[0]["path"])) == ["step-20.a1"], "deleted ones are gone"
    node, = c.json("node", "ls")["nodes"]
    assert (node["name"], node["state"], node["devices"], node["device_kind"]) == ("n1", "UP", 2, "cpu"), node
    assert node["memory_mib"] > 0 and node["admin"] == "NONE", node
    assert c.ok("node", "ls").splitlines()[0].split()[:4] == ["NODE", "STATE", "ADMIN", "DEVICES"]
    assert "LABELS" in c.ok("-o", "wide", "node", "ls").splitlines()[0]
    one = c.json("node", "show", "n1")
    assert one["schema"] == "boost.node/1" and one["node"]["name"] == "n1" and one["node"]["cores"] >= 1, one
    text = c.ok("node", "show", "n1")
    assert text.startswith("node n1\n") and "\ndevices      0 of 2 busy (cpu)\n" in text, text
    fails(c, 4, "there is no node n2", "node", "show", "n2")
    fails(c, 2, "takes: node show NODE", "node", "show")


@shared
def test_ping_and_version(c):
    answer = c.json("ping")
    assert answer["schema"] == "boost.ping/1" and answer["nodes_up"] == 1 and answer["up_s"] > 0, answer
    assert re.fullmatch(r"[0-9a-f]{8}", answer["store_id"]), answer
    assert re.match(r"boostd \S+ is up for ", c.ok("ping"))
    own = c.ok("--version")
    both = c.ok("version")
    assert own.startswith("boostctl ") and both.startswith(own) and "boostd " in both, both


# ---- files without a controller -----------------------------------------------------------


@shared
def test_validate_encode_decode(c):
    nowhere = {"BOOST_SOCKET": str(c.dir / "no-such-socket")}
    path = c.dir / "good.pbtxt"
    path.write_text(tiny_job(c, tp=2, extra='label { key: "team" value: "\\303\\251t\\351" }\npriority: 7'.replace("\\351", "e")))
    assert c.ok("validate", path, env=nowhere) == f"{path}: valid  [text spec]\n"
    assert json.loads(c.ok("-o", "json", "validate", path, env=nowhere)) == {"schema": "boost.validate/1", "valid": True}
    text = c.ok("decode", path, env=nowhere)
    c.ok("encode", path, "-O", c.dir / "good.pb", env=nowhere)
    c.ok("encode", path, "--to", "json", "-O", c.dir / "good.json", env=nowhere)
    assert c.ok("decode", c.dir / "good.pb") == text and c.ok("decode", c.dir / "good.json") == text
    c.ok("encode", c.dir / "good.json", "-O", c.dir / "again.pb")
    assert (c.dir / "again.pb").read_bytes() == (c.dir / "good.pb").read_bytes()
    assert "priority: 9" in c.ok("decode", path, "--set", "priority=9")
    r = c.ctl("-o", "json", "validate", path, "--set", "parallel.tp=3")
    answer = json.loads(r.out)
    assert r.rc == 6 and answer["valid"] is False and "parallel.tp" in answer["message"] and answer["hint"], r


# ---- waiting -------------------------------------------------------------------------------


@shared
def test_wait(c):
    job = c.submit(endless(c, name="awaited"))
    assert c.ctl("wait", job, "--for=RUNNING", "--timeout", "30s").rc == 0
    assert c.ctl("wait", job, "--for=step>=5", "--timeout", "30s").rc == 0
    begin = time.monotonic()
    fails(c, 7, ["timed out", "RUNNING"], "wait", job, "--timeout", "300ms")
    assert 0.25 < time.monotonic() - begin < 5
    fails(c, 2, "--for", "wait", job, "--for=WALKING")
    waiting = c.popen_ctl("wait", job)
    c.ok("cancel", "--now", job)
    waiting.communicate(timeout=20)
    assert waiting.returncode == 1
    fails(c, 1, "ended CANCELLED before that", "wait", job, "--for=COMPLETED")
    assert c.ctl("wait", done_job(c)).rc == 0
    assert c.ctl("wait", done_job(c), job).rc == 1, "one of two was cancelled"
    r = c.ctl("-o", "json", "wait", done_job(c), job)
    answer = json.loads(r.out)
    assert r.rc == 1 and answer["schema"] == "boost.wait/1", answer
    assert [(j["id"], j["state"]) for j in answer["jobs"]] == [(done_job(c), "COMPLETED"), (job, "CANCELLED")], answer


@shared
def test_interrupting_a_follow_leaves_the_job(c):
    job = c.submit(endless(c, name="left-alone"))
    follow = c.popen_ctl("wait", job, "--follow")
    running(c, job)
    follow.send_signal(signal.SIGINT)
    out, _ = follow.communicate(timeout=10)
    assert follow.returncode == 130 and f"job {job} goes on" in out, out
    assert c.status(job)["state"] == "RUNNING"
    cancel_now(c, job)


@shared
def test_follows_outlive_a_restart_of_boostd(c):
    job = c.submit(job_of(c, steps=STEPS, every=0, name="outlived"))
    wait_rank_step(c, job, 1, 5)
    follows = [c.popen_ctl(*args, stderr=-1) for args in
               (["wait", job, "--follow"], ["logs", job, "-f"], ["-o", "jsonl", "metrics", job, "-f", "--name", "loss"],
                ["-o", "jsonl", "events", job, "-f"], ["wait", job, "--for=COMPLETED"])]
    wait_rank_step(c, job, 1, 15)
    c.boostd.kill9()
    wait_rank_step(c, job, 1, 25)
    c.start_boostd()
    out = []
    for follow in follows:
        text, err = follow.communicate(timeout=60)
        assert follow.returncode == 0, (follow.args, text[-500:], err)
        out.append(text)
    assert f"job {job} COMPLETED" in out[0], out[0]
    assert out[1] == c.ok("logs", job), "the log, each line once"
    steps = [r["step"] for r in map(json.loads, out[2].splitlines()) if "loss" in r]
    assert sorted(steps) == list(range(1, STEPS + 1)), f"each step once: {steps}"
    events = [json.loads(x) for x in out[3].splitlines()]
    assert events == c.json("events", job)["events"], "each event once"


# ---- steering ------------------------------------------------------------------------------


@shared
def test_hold_and_release(c):
    job = c.submit(job_of(c, steps=STEPS, every=0, name="held"))
    wait_rank_step(c, job, 1, 40)
    assert "checkpoint" in c.ok("hold", job)
    row = c.wait_state(job, "HELD", deadline=40)
    assert row["reason"] == "Held" and 40 <= row["step"] < STEPS, row
    assert row["last_checkpoint_step"] == row["step"], "held with a checkpoint of where it was"
    assert ended(c.rank_pids(job, 1).values())
    fails(c, 5, "HELD", "checkpoint", job)
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    second = attempts(c, job)[1]
    assert second["from_step"] == row["step"], (second, row)
    assert same_losses(c, job, twin_of(c, steps=STEPS, every=0), STEPS) == 0, "nothing was replayed"


@shared
def test_cancel_with_a_checkpoint_first(c):
    job = c.submit(endless(c, name="cancelled", tp=2))
    wait_rank_step(c, job, 1, 30)
    pids = c.rank_pids(job, 1)
    os.kill(pids[1], signal.SIGSTOP)  # so that STOPPING lasts long enough to be seen
    try:
        c.ok("cancel", job)
        row = c.wait_state(job, "STOPPING", deadline=5)
        waits = c.json("show", job)["waits"]
        assert waits and waits[0]["name"] and waits[0]["limit_s"] >= 30, f"a named wait with its timer: {waits}"
    finally:
        os.kill(pids[1], signal.SIGCONT)
    row = c.wait_state(job, "CANCELLED", deadline=40)
    assert row["reason"] == "Cancelled" and row["step"] >= 30, row
    assert newest_committed(c, job, 1) == row["step"] == row["last_checkpoint_step"], (row, c.json("ckpt", "ls", job))
    assert ended(pids.values())
    fails(c, 5, "CANCELLED", "cancel", job)
    fails(c, 5, "CANCELLED", "hold", job)
    fails(c, 5, "CANCELLED", "release", job)


@shared
def test_cancel_now(c):
    job = c.submit(endless(c, name="now", tp=2))
    pids = running(c, job)
    begin = time.monotonic()
    cancel_now(c, job)
    print(f"# cancel --now took {time.monotonic() - begin:.3f} s")
    assert ended(pids.values()) and newest_committed(c, job, 1) == 0
    r = c.ctl("cancel", "-y", job, 99999)
    assert r.rc == 5 and "99999" in r.err, r
    queued = c.submit(tiny_job(c, name="never-ran"), "--hold")
    c.ok("cancel", queued)
    assert c.status(queued)["state"] == "CANCELLED"


@shared
def test_checkpoint_on_demand(c):
    job = c.submit(endless(c, name="demanded", tp=2))
    wait_rank_step(c, job, 1, 20)
    c.ok("checkpoint", job)
    wait_until(lambda: c.status(job).get("last_checkpoint_step"), 20, "a committed checkpoint")
    assert c.status(job)["last_checkpoint_step"] >= 20 and c.status(job)["state"] == "RUNNING"
    first = c.status(job)["last_checkpoint_step"]
    c.ok("checkpoint", job)
    wait_until(lambda: c.status(job)["last_checkpoint_step"] > first, 20, "a second one")
    cancel_now(c, job)


@shared
def test_names_and_prefixes(c):
    one, two = (c.submit(tiny_job(c, name=f"alpha-{x}"), "--hold") for x in ("one", "two"))
    assert c.status("alpha-o")["id"] == one and c.status("alpha-two")["id"] == two
    fails(c, 4, ["alpha", f"{one}", "alpha-one", f"{two}", "alpha-two"], "show", "alpha")
    fails(c, 4, "99999", "show", "99999")
    fails(c, 4, "no-such", "cancel", "no-such")
    c.ok("cancel", "-y", "alpha-one", "alpha-two")


@shared
def test_time_limit(c):
    job = c.submit(endless(c, name="limited", extra="time_limit_s: 1"))
    fails(c, 1, "TIMEOUT", "wait", job)
    row = c.status(job)
    assert row["state"] == "TIMEOUT" and row["reason"] == "TimeLimit" and "1 s" in row["info"], row
    assert newest_committed(c, job, 1) == row["step"] > 0, row


@shared
def test_priority_and_what_a_job_waits_for(c):
    blocker = c.submit(endless(c, name="blocker", tp=2))
    running(c, blocker)
    order = [c.submit(tiny_job(c, tp=2, steps=5, name=f"prio-{p}", extra=f"priority: {p}")) for p in (10, 90, 50)]
    row = c.status(order[1])
    assert (row["state"], row["reason"]) == ("QUEUED", "NoDevices") and "needs 2 devices, 0 of 2 free" in row["info"], row
    assert f"job {order[1]} is ahead" in c.status(order[0])["info"] or "needs 2" in c.status(order[0])["info"]
    assert "3 queued" in c.ok("status").splitlines()[-1]
    never = c.submit(tiny_job(c, tp=4, name="too-large", extra="priority: 100"))
    row = c.status(never)
    assert row["state"] == "QUEUED" and "needs 4 devices on a node; the largest has 2" in row["info"], row
    cancel_now(c, blocker)
    for job in order:
        c.wait_state(job, "COMPLETED")
    starts = sorted((attempts(c, job)[0]["start"], job) for job in order)
    assert [job for _, job in starts] == [order[1], order[2], order[0]], starts
    assert c.status(never)["state"] == "QUEUED", "a job that fits nowhere keeps nobody waiting"
    c.ok("cancel", never)


# ---- exit codes -----------------------------------------------------------------------------


@shared
def test_exit_codes(c):
    fails(c, 3, ["cannot reach boostd", "no-such"], "--socket", c.dir / "no-such", "status")
    fails(c, 2, "107", "--socket", "/" + "x" * 120, "ping")
    fails(c, 2, "unknown command 'stauts'", "stauts")
    fails(c, 2, "unknown option '--frobnicate'", "status", "--frobnicate")
    fails(c, 2, "table, wide, json", "-o", "xml", "status")
    for words in (["-o", "json"], ["-ojson"], ["--output=json"]):
        fails(c, 2, "-o FORMAT goes before the command: boostctl -o FORMAT status", "status", *words)
    fails(c, 2, "-q goes before the command", "wait", "1", "-q")
    fails(c, 2, "boostctl metrics JOB -o csv", "-o", "csv", "metrics", "1")
    fails(c, 2, "needs a job", "cancel")
    for args in (["data"], ["sample", "1"], ["eval", "1", "x"]):
        fails(c, 5, "not built in this version", *args)


@shared
def test_config_files_are_checked_without_a_controller(c):
    agent, boostd = c.dir / "agent.conf", c.dir / "boostd.conf"
    agent.write_text('label { key: "rack" value: "r1" }\nhealth_interval_ms: 1000\n')
    boostd.write_text("heartbeat_ms: 1000\n")
    nowhere = {"BOOST_SOCKET": "/nowhere"}
    assert c.ok("config", "check", agent, env=nowhere) == f"{agent}: valid for boost-agent\n"
    assert c.ok("config", "check", boostd, env=nowhere) == f"{boostd}: valid for boostd\n"
    fails(c, 6, [":1:1: ", "label"], "config", "check", agent, "--for", "boostd")
    boostd.write_text("state_dir: \"/x\"\n  heartbeet_ms: 5\n")
    fails(c, 6, [":2:3", "heartbeet_ms", "heartbeat_ms"], "config", "check", boostd)
    unnamed = c.dir / "x.conf"
    unnamed.write_text("hartbeat_ms: 5\n")
    fails(c, 6, ["hint: BoostdConfig has: state_dir", "; --for agent checks it as agent.conf"], "config", "check", unnamed)
    unnamed.write_text("health_interval_ms: 100\n")  # in range for an agent, and no field of boostd's
    assert c.ok("config", "check", unnamed) == f"{unnamed}: valid for boost-agent\n"
    answer = json.loads(c.ctl("-o", "json", "config", "check", boostd).out)
    assert answer["schema"] == "boost.config-check/1" and answer["valid"] is False and ":2:3" in answer["message"], answer
    boostd.write_text('listen: "x:99999"\n')
    fails(c, 6, ["listen", '"x:99999" is no address', "the port"], "config", "check", boostd)
    fails(c, 2, "takes: config check FILE", "config", "check")
    fails(c, 6, "/nowhere/agent.conf", "config", "check", "/nowhere/agent.conf")
    example = ROOT / "deploy" / "examples" / "agent.conf"
    if example.exists():  # not where only what was built is
        assert c.ok("config", "check", example).endswith(": valid for boost-agent\n")
        assert subprocess.run(["sh", "-n", example.parent / "health.sh"], timeout=60).returncode == 0
    assert c.ok("config").startswith(f"socket  {c.socket}  ($BOOST_SOCKET)\n")


COMPLETE = """
source <({bin}/boostctl completion bash)
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_boostctl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@shared
def test_completion(c):
    job = c.submit(tiny_job(c, name="complete-me"), "--hold")

    def completes(words):
        env = {**c.env, "PATH": f"{BIN}:{os.environ['PATH']}"}
        r = subprocess.run(["bash", "--norc", "-c", COMPLETE.format(bin=BIN, words=words)], env=env, cwd=c.dir,
                           capture_output=True, text=True, timeout=30)
        assert r.returncode == 0 and not r.stderr, r
        return r.stdout.split()
    assert completes("boostctl su") == ["submit"]
    assert {"submit", "node", "config", "version"} <= set(completes("boostctl ''"))
    assert completes("boostctl submit --dry") == ["--dry-run"]
    assert "--no-color" in completes("boostctl --n")
    assert completes("boostctl -o js") == ["json", "jsonl"]
    assert set(completes("boostctl node ''")) == {"ls", "show", "cordon", "drain", "resume"}
    assert completes("boostctl -o wide node show ''") == ["n1"]
    assert "complete-me" in completes("boostctl show comp") and str(job) in completes(f"boostctl show {job}")
    c.ok("cancel", job)
    for shell in ("zsh", "fish"):
        assert "boostctl --help" in c.ok("completion", shell)
        if shutil.which(shell):
            subprocess.run([shell, "-n", "/dev/stdin"], input=c.ok("completion", shell), text=True, check=True, timeout=30)
    fails(c, 2, "takes: completion bash|zsh|fish", "completion", "csh")


test_nothing_is_left = shared.last

run(globals())
