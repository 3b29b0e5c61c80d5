#!/usr/bin/env python3
# time limit: 180 s
"""Random kills of random processes at random moments, starting and stopping included: the job still ends, with the losses
of an undisturbed run to the last bit, and nothing is left. BOOST_CHAOS_SEED repeats a run, BOOST_CHAOS_KILLS makes it longer."""
import os, random, signal, time

from harness import Cluster, alive, run, wait_until
from jobs import ended, job_of, same_losses, twin_of

SEED = int(os.environ.get("BOOST_CHAOS_SEED") or random.SystemRandom().randrange(10**6))
KILLS = int(os.environ.get("BOOST_CHAOS_KILLS") or 14)
STEPS = 60


def kill_something(c, rng, job):
    """One kill; what it was, or None if there was nothing of that kind."""
    attempt = c.newest_attempt(job)
    what = rng.choice(["rank", "rank", "keeper", "agent", "boostd", "both"])
    if what == "rank":
        pids = c.rank_pids(job, attempt)
        if not pids:
            return None
        rank = rng.choice(sorted(pids))
        sig = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV])
        os.kill(pids[rank], sig)
        return f"rank {job}.{attempt}/{rank} with signal {int(sig)}"
    if what == "keeper":
        pid = c.keeper_pid(job, attempt)
        if not pid:
            return None
        os.kill(pid, signal.SIGKILL)
        return f"keeper of {job}.{attempt}"
    if what in ("agent", "both"):
        c.agents["n1"].kill9()
    if what in ("boostd", "both"):
        c.boostd.kill9()
    time.sleep(rng.random() * 0.3)  # how long it is away is part of the dice
    if what in ("boostd", "both"):
        c.start_boostd()
    if what in ("agent", "both"):
        c.start_agent("n1")
    return what


class ChaosCluster(Cluster):
    def newest_attempt(self, job):
        """From the run directories: boostd may be away."""
        found = [int(d.name.rsplit(".", 1)[1]) for d in (self.dir / "agent-n1" / "attempts").glob(f"*-{job}.*")]
        return max(found, default=1)


def test_random_kills():
    print(f"# BOOST_CHAOS_SEED={SEED}", flush=True)
    rng = random.Random(SEED)
    limits = "restart { max_restarts: 100000 no_progress_limit: 100000 }"
    with ChaosCluster(boostd_set={"backoff_min_ms": 50, "backoff_max_ms": 200}) as c:
        twin = twin_of(c, steps=STEPS, every=5, extra=limits)
        done, jobs, job = [], 0, None
        end = time.monotonic() + 100
        while len(done) < KILLS and time.monotonic() < end:
            if job is None:
                job = c.submit(job_of(c, steps=STEPS, every=5, name=f"chaos-{jobs}", extra=limits))
                jobs += 1
            time.sleep(rng.random() * 0.5)
            try:
                killed = kill_something(c, rng, job)
            except ProcessLookupError:
                continue  # it had just ended by itself
            if killed:
                done.append(killed)
            if c.status(job)["state"] == "COMPLETED":
                same_losses(c, job, twin, STEPS)
                job = None
        if job:
            c.wait_state(job, "COMPLETED", deadline=60)
            same_losses(c, job, twin, STEPS)
        ends = [(j["attempt"], j["state"]) for j in c.json("status", "-a")["jobs"]]
        assert all(state == "COMPLETED" for _, state in ends), ends
        print(f"# {len(done)} kills over {jobs} jobs with {sum(a for a, _ in ends)} attempts: {', '.join(done)}")


run(globals())
