#!/usr/bin/env python3
"""D9: a controller that did not run for a while has not heard its nodes for its own fault: none is DOWN, no job moves."""
import os, signal, time
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import Cluster, run, wait_until
from jobs import endless


def test_d09_controller_paused_for_longer_than_the_node_timeout():
    quick = {"heartbeat_ms": 100, "suspect_ms": 500, "node_timeout_ms": 1500, "restart_grace_ms": 1000}
    with Cluster(agents=2, tls=True, boostd_set=quick) as c:
        job = c.submit(endless(c))
        c.wait_state(job, "RUNNING")
        wait_until(lambda: time.sleep(0.1) or float(c.ok("ping").split(" up for ")[1].split("s")[0]) > 1.5, 10, "no grace")
        for _ in range(3):
            os.kill(c.boostd.pid, signal.SIGSTOP)
            time.sleep(3)  # what is tested
            os.kill(c.boostd.pid, signal.SIGCONT)
            c.wait_nodes(2)
        kinds = [e["kind"] for e in c.json("events")["events"]]
        assert "node-down" not in kinds, kinds
        row = c.status(job)
        assert (row["state"], row["attempt"]) == ("RUNNING", 1), row
        assert "boostd did not run for" in c.boostd.log_text()
        # What is really silent is found out as ever.
        c.agents["n2"].kill9()
        wait_until(lambda: "node-down" in [e["kind"] for e in c.json("events")["events"]], 10, "n2 DOWN")


run(globals())
