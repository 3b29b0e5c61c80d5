#!/usr/bin/env python3
"""D51: two halves of a job never go on each by itself: who is in an attempt only the controller decides."""
import os, signal, time
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import Cluster, alive, processes_with, run, wait_until
from jobs import endless, wait_committed


def ranks(c):
    return [p for p in processes_with(str(c.dir)) if "boost-worker" in Path(f"/proc/{p}/cmdline").read_text()]


def test_d51_without_the_controller_half_a_job_starts_nothing():
    quick = {"node_timeout_ms": 1500, "suspect_ms": 700, "heartbeat_ms": 200, "restart_grace_ms": 20000}
    with Cluster(agents=2, cpu_slots=1, boostd_set=quick) as c:
        spec = endless(c, name="halves", every=20, batch=12).replace("tp: 1 micro_batch: 12", "tp: 1 dp: 2 micro_batch: 6")
        job = c.submit(spec + "resources { nodes: 2 min_nodes: 1 devices_per_node: 1 }\n")
        wait_committed(c, job, 20)
        pids = {n: c.rank_pids(job, 1, n) for n in ("n1", "n2")}
        c.boostd.kill9()
        os.kill(next(iter(pids["n2"].values())), signal.SIGKILL)
        # The other half loses its peer and ends; both agents wait for word, whatever min_nodes would allow.
        wait_until(lambda: not any(alive(p) for half in pids.values() for p in half.values()), 30, "both halves to end")
        end = time.monotonic() + 2
        while time.monotonic() < end:
            assert not ranks(c), "an agent has started ranks by itself"
            time.sleep(0.05)
        c.start_boostd()
        wait_until(lambda: c.status(job)["state"] == "RUNNING" and c.status(job)["attempt"] == 2, 30, "attempt 2")
        shown = c.json("show", job)
        assert sorted(shown["attempts"][1]["nodes"]) == ["n1", "n2"], shown["attempts"][1]
        assert shown["attempts"][0]["text"].startswith("rank "), shown["attempts"][0]
        assert "SIGKILL" in shown["attempts"][0]["text"], "the first failing rank, not the one that lost it"
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED")


run(globals())
