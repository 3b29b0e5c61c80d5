#!/usr/bin/env python3
"""What users say to the scheduler: several nodes, names of nodes, labels, dependencies, preemption, update, usage."""
from harness import run
from jobs import Shared, endless, job_of, losses, tiny_job, wait_committed

shared = Shared(agents=2, cpu_slots=2, boostd_set={"preempt": "true", "preempt_gap": 20, "user_queued_jobs": 4})


def sets(**fields):
    return [x for k, v in fields.items() for x in ("--set", f"{k.replace('__', '.')}={v}")]


@shared
def test_a_job_over_two_nodes(c):
    common = dict(run__precision="FP64", parallel__micro_batch=6, parallel__global_batch=12, resources__threads_per_rank=1)
    one = c.submit(job_of(c, steps=12, every=0, name="one", tp=2), *sets(**common))
    c.wait_state(one, "COMPLETED")
    two = c.submit(job_of(c, steps=12, every=4, name="two", tp=2), *sets(resources__nodes=2, parallel__dp=2, **common))
    c.wait_state(two, "COMPLETED")
    row = c.status(two)
    assert row["nodes"] == ["n1", "n2"] and row["devices"] == 4, row
    ours, theirs = ({s: r[1] for s, r in losses(c, job).items()} for job in (two, one))
    assert len(theirs) == 12 and all(abs(ours[s] - theirs[s]) <= 1e-9 * theirs[s] for s in theirs), (ours, theirs)


@shared
def test_names_of_nodes_and_labels(c):
    job = c.submit(tiny_job(c, name="named"), *sets(resources__nodelist="n[2-9]"))
    c.wait_state(job, "COMPLETED")
    assert c.status(job)["nodes"] == ["n2"]
    job = c.submit(tiny_job(c, name="not-there"), *sets(resources__exclude="n2"))
    c.wait_state(job, "COMPLETED")
    assert c.status(job)["nodes"] == ["n1"]
    job = c.submit(tiny_job(c, name="labelled"), *sets(resources__constraint="gpu=h200|fast"))
    assert c.status(job)["info"] == "needs 1 node with gpu=h200|fast, 0 up"
    c.start_agent("n3", **{"label": '{key: "fast"}'})
    c.wait_state(job, "COMPLETED")
    assert c.status(job)["nodes"] == ["n3"]
    r = c.ctl("submit", "-", "--set", "resources.constraint=gpu=", input=tiny_job(c))
    assert r.rc == 6 and "is not a constraint: no value at character 5" in r.err, r
    c.agents["n3"].terminate()


@shared
def test_dependencies(c):
    first = c.submit(tiny_job(c, name="first"), "--hold")
    then = c.submit(tiny_job(c, name="then"), *sets(after=f"afterok:{first}"))
    vain = c.submit(tiny_job(c, name="vain"), *sets(after=f"afternotok:{first}"))
    row = c.status(then)
    assert (row["state"], row["reason"]) == ("QUEUED", "Dependency"), row
    assert row["info"] == f"afterok:{first}: job {first} (first) is HELD", row
    c.ok("release", first)
    c.wait_state(then, "COMPLETED")
    row = c.status(vain)
    assert (row["state"], row["reason"]) == ("HELD", "Dependency") and "can never be met" in row["info"], row
    c.ok("release", vain)
    c.wait_state(vain, "COMPLETED")
    r = c.ctl("submit", "-", "--set", "after=afterok:999", input=tiny_job(c))
    assert r.rc == 6 and "there is no such job" in r.err, r


@shared
def test_update_preemption_and_usage(c):
    low = c.submit(endless(c, name="low", tp=2, every=5, extra="priority: 40"), *sets(resources__nodelist="n1"))
    wait_committed(c, low)
    twin = job_of(c, name="high", tp=2, steps=10)
    high = c.submit(twin, "--set", "priority=45", *sets(resources__nodelist="n1"))
    assert "needs 2 devices of n1, 0 of 2 free" == c.status(high)["info"]
    assert c.ok("update", high, "priority=80", "time_limit_s=100") == f"job {high}: priority 80, time limit 100 s\n"
    c.wait_state(high, "COMPLETED")
    c.wait_state(low, "RUNNING")
    row = c.status(low)
    assert row["attempt"] == 2 and row["restarts"] == 1, row
    kinds = [e["kind"] for e in c.events(low)]
    assert "preempted" in kinds and "queued" in kinds, kinds
    r = c.ctl("update", low, "steps=3")
    assert r.rc == 2 and "only priority and time_limit_s" in r.err and "boostctl restart JOB --set" in r.err, r
    assert c.ctl("update", high, "priority=1").rc == 5
    c.ok("cancel", "--now", low)
    rows = c.json("usage", "--me")["users"]
    assert len(rows) == 1 and rows[0]["device_seconds"] > 1 and rows[0]["jobs"] >= 2, rows
    assert rows[0]["recent_device_seconds"] > 0
    assert c.json("usage", "-u", "nobody-here")["users"] == []
    assert "DEVICE-H" in c.ok("usage", "--since", "1h")


@shared
def test_an_array(c):
    spec = c.dir / "sweep.pbtxt"
    spec.write_text(tiny_job(c, name="sweep", steps=5))
    out = c.ok("submit", spec, "--array", "0-4:2%1", "--set", "optimizer.lr={1e-3|2e-3|3e-3}", "--set", "run.seed={i}", "--wait")
    first = int(out.split()[1])
    assert f"array {first} queued: jobs {first} to {first + 2}, sweep-0 to sweep-4, 1 at once (each 1 node x 1 device" in out, out
    for k in range(3):
        shown = {**c.status(f"{first}_{2 * k}"), **c.json("show", f"{first}_{2 * k}")}
        assert shown["id"] == first + k and shown["name"] == f"sweep-{2 * k}" and shown["array_index"] == 2 * k, shown
        assert shown["array_job"] == first and shown["state"] == "COMPLETED"
        assert shown["resolved"]["optimizer"]["lr"] == (k + 1) / 1000 and shown["resolved"]["run"]["seed"] == 2 * k
    times = sorted((shown["attempts"][0]["start"], shown["attempts"][0]["end"])
                   for shown in (c.json("show", first + k) for k in range(3)))
    assert all(a[1] <= b[0] for a, b in zip(times, times[1:])), f"two ran at once: {times}"
    ids = c.ok("submit", spec, "--array", "1-3", "--parsable", "--hold").split()
    out = c.ok("cancel", "-y", f"{ids[0]}_*")
    assert all(f"job {i}: CANCELLED" in out for i in ids), out
    for words, rc, says in ((["--array", "3-1"], 2, "goes down"), (["--array", "0-1", "--set", "run.seed={1|2|3}"], 2, "not as many"),
                            (["--array", "0-1", "--set", "parallel.tp={1|3}"], 6, "task 1"), (["--array", "0-4"], 5, "task 0: "),
                            (["-n", "--array", "0-1", "--set", "resources.threads_per_rank={1|5000}"], 6, "task 1: ")):
        r = c.ctl("submit", spec, *words)
        assert r.rc == rc and says in r.err, (words, r)


@shared
def test_limits(c):
    held = [c.submit(tiny_job(c, name=f"held-{i}"), "--hold") for i in range(4)]
    r = c.ctl("submit", "-", input=tiny_job(c))
    assert r.rc == 5 and "has 4 jobs queued or held, and may have 4" in r.err, r
    c.ok("cancel", "-y", *held)


test_nothing_is_left = shared.last

if __name__ == "__main__":
    run(globals())
