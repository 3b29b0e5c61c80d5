#!/usr/bin/env python3
"""Failures of every kind that one machine can show, each with what the job does about it and what it says."""
import os, shutil, signal, subprocess, time

from harness import Cluster, Skip, run, wait_until
from jobs import Shared, at, ended, endless, job_of, wait_committed, wait_event

shared = Shared(cpu_slots=2, agent_set={"hang_min_ms": 1500})


def wait_attempt(c, job, number, deadline=30):
    def there():
        s = c.status(job)
        return (s.get("attempt") or 0) >= number and s["state"] == "RUNNING"
    wait_until(there, deadline, f"attempt {number} of job {job}: {c.status(job)}")


@shared
def test_a_rank_that_hangs_is_named_and_not_its_victims(c):
    job = c.submit(endless(c, tp=2, every=20, name="hangs"))
    wait_committed(c, job, 20)
    pids = c.rank_pids(job, 1)
    begin = time.time()
    os.kill(pids[1], signal.SIGSTOP)  # rank 0 waits for it in a collective, and stands as still
    event = wait_event(c, job, "hang")
    print(f"# a hang of 1.5 s was told after {at(event) - begin:.2f} s")
    assert at(event) - begin < 8 and "restart 1 of 3" in event["text"], event
    assert ended(pids.values()) or wait_until(lambda: ended(pids.values()), 5, "both to be killed")
    wait_attempt(c, job, 2)
    first = c.json("show", job)["attempts"][0]
    assert first["reason"] == "Hang" and "last collective: " in first["text"], first
    g = c.json("show", job)["goodput"]
    assert 1 < g["detection_s"] < 8, g
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_a_killed_rank_is_told_with_its_last_collective(c):
    job = c.submit(endless(c, tp=2, every=20, name="dies"))
    wait_committed(c, job, 20)
    os.kill(c.rank_pids(job, 1)[1], signal.SIGSEGV)
    wait_attempt(c, job, 2)
    text = c.json("show", job)["attempts"][0]["text"]
    assert text.startswith("rank 1 on n1: signal 11 (SIGSEGV)"), text
    assert "\nlast collective: " in text and "\" in group " in text, text
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_a_data_file_that_vanishes_holds_the_job_until_it_is_back(c):
    data = c.dir / "gone.txt"
    shutil.copyfile(c.dir / "train.txt", data)
    text = endless(c, name="vanishes", every=20).replace(str(c.dir / "train.txt"), str(data))
    job = c.submit(text)
    step = wait_committed(c, job, 20)
    data.unlink()
    os.kill(c.rank_pids(job, 1)[0], signal.SIGKILL)
    row = c.wait_state(job, "HELD", deadline=60)  # its checkpoints say that the job was right
    shown = c.json("show", job)
    assert "no progress in" in row["info"] and str(data) in shown["reason_text"], (row, shown["reason_text"])
    assert shown["restarts_used"] == 0, shown["restarts_used"]
    data.write_bytes((c.dir / "train.txt").read_bytes())
    c.ok("release", job)
    c.wait_step(job, step + 5)
    wait_until(lambda: c.status(job)["state"] == "RUNNING", 20, "it runs again")
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_a_last_checkpoint_that_cannot_be_written_costs_no_restart(c):
    """A file stands where the first attempt's last checkpoint is to go; nothing is in the second one's way."""
    steps = 400
    job = c.submit(job_of(c, steps=steps, every=20, name="last"))
    wait_committed(c, job, 20)
    base = os.path.dirname(c.json("ckpt", "ls", job)["checkpoints"][0]["path"])
    with open(f"{base}/step-{steps}.a1", "w"):
        pass
    c.wait_state(job, "COMPLETED", deadline=90)
    text = wait_event(c, job, "rank-exit")["text"]
    assert "exit code 66 (disk): final checkpoint: " in text and f"step-{steps}.a1" in text, text
    assert "infrastructure, no restart used" in text, text
    assert c.status(job)["last_checkpoint_step"] == steps


@shared
def test_a_job_whose_own_checkpoint_directory_is_spoiled_does_not_start(c):
    """Found before the first step, not after the last."""
    held = c.submit(job_of(c, steps=1_000_000, every=20, name="before"))
    wait_committed(c, held, 20)
    base = os.path.dirname(c.json("ckpt", "ls", held)["checkpoints"][0]["path"])
    c.ok("cancel", "--now", held)
    c.wait_state(held, "CANCELLED")
    store = os.path.basename(base).split("-")[0]
    spoiled = f"{os.path.dirname(base)}/{store}-{held + 1}"
    with open(spoiled, "w"):
        pass
    job = c.submit(job_of(c, steps=10, name="spoiled"))
    assert job == held + 1, job
    row = c.wait_state(job, "FAILED")
    assert row["reason"] == "SpecError" and spoiled in row["info"] and not row.get("step"), row
    os.unlink(spoiled)


@shared
def test_the_keeper_dies(c):
    job = c.submit(endless(c, tp=2, every=20, name="orphans"))
    wait_committed(c, job, 20)
    pids = c.rank_pids(job, 1)
    os.kill(c.keeper_pid(job, 1), signal.SIGKILL)
    wait_attempt(c, job, 2)
    assert ended(pids.values())
    shown = c.json("show", job)
    assert shown["restarts_used"] == 0 and shown["attempts"][0]["text"], shown["attempts"][0]
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_a_time_limit_ends_with_a_checkpoint(c):
    job = c.submit(endless(c, tp=1, name="limited", extra="time_limit_s: 3"))
    c.wait_state(job, "RUNNING")
    row = c.wait_state(job, "TIMEOUT", deadline=20)
    assert row["last_checkpoint_step"] == row["step"] > 0 and row["reason"] == "TimeLimit", row


test_nothing_is_left = shared.last


def test_a_full_disk_stops_no_job():
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        raise Skip("cannot mount a small file system")
    with Cluster(agents=0, cpu_slots=1) as c:
        ckpt = c.dir / "ckpt"
        ckpt.mkdir()
        c.start_agent("n1", wrap=["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=4m none {ckpt} && exec "$@"', "-"])
        c.wait_nodes(1)
        inside = ["nsenter", "-t", str(c.agents["n1"].pid), "-m"]
        job = c.submit(endless(c, every=20, name="full"))
        wait_committed(c, job, 20)
        subprocess.run([*inside, "dd", "if=/dev/zero", f"of={ckpt}/filler", "bs=64k"], capture_output=True)
        gave_up = wait_event(c, job, "checkpoint-abandoned")
        assert "No space left" in gave_up["text"], gave_up
        row = c.status(job)
        assert row["state"] == "RUNNING" and row["reason"] == "DiskFull" and "No space left" in row["info"], row
        subprocess.run([*inside, "rm", f"{ckpt}/filler"], check=True)
        wait_committed(c, job, c.status(job)["step"])
        row = c.status(job)
        assert row["state"] == "RUNNING" and row["reason"] == "" and row["attempt"] == 1, row
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED")


run(globals())
