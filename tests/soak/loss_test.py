#!/usr/bin/env python3
"""Ten minutes (BOOST_SOAK_LOSS_S: another time) of a network that loses 30 % of what arrives, at boostd and at the
agents: no node is DOWN for it, with the limits of the default configuration, and a job over two of them runs to its end."""
# time limit: 1500
import os, re, sqlite3, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, run, tiny_job, wait_until
from jobs import losses

SECONDS = int(os.environ.get("BOOST_SOAK_LOSS_S") or 600)
NODES, LOSS_PCT = 4, 30
# After the loss has ended nothing does: it lasts as long as the daemons. So all waits here are of a slow network.
PATIENCE = 120


def retransmitted():
    """Segments that this machine has sent again, so far."""
    names, values = (x.split()[1:] for x in Path("/proc/net/snmp").read_text().splitlines() if x.startswith("Tcp:"))
    return dict(zip(names, map(int, values)))["RetransSegs"]


class LossyCluster(Cluster):
    def __init__(self):
        super().__init__(start=False, tls=True, cpu_slots=1)
        self.boostd_set = {}
        self.env.update(LD_PRELOAD=str(BIN.parent / "tests" / "fakes" / "lossy.so"), BOOST_TEST_LOSS_PCT=str(LOSS_PCT))
        assert Path(self.env["LD_PRELOAD"]).exists(), "make tests builds lossy.so"
        self.start_boostd()
        for i in range(NODES):
            self.start_agent(f"n{i + 1}")
        self.env.pop("BOOST_HOST")  # what the test asks goes by the Unix socket
        self.wait_nodes(NODES, deadline=PATIENCE)

    def states(self):
        return {x["name"]: x["state"] for x in self.json("node", "ls")["nodes"]}


def job_of(c, steps):
    text = tiny_job(c, steps=steps, every=50, extra="resources { device: CPU nodes: 2 devices_per_node: 1 }")
    return text.replace("micro_batch: 2 global_batch: 2", "dp: 2 micro_batch: 1 global_batch: 2")


def test_thirty_per_cent_are_lost():
    with LossyCluster() as c:
        jobs, seen, again, begin = [], {}, retransmitted(), time.monotonic()
        while time.monotonic() < begin + SECONDS:
            if not jobs or c.status(jobs[-1])["state"] == "COMPLETED":
                jobs.append(c.submit(job_of(c, 2000)))
            for state in c.states().values():
                seen[state] = seen.get(state, 0) + 1
            time.sleep(0.1)
        again = retransmitted() - again
        for job in jobs:
            c.wait_state(job, "COMPLETED", deadline=PATIENCE)
            row = c.status(job)
            assert row["attempt"] == 1, c.explain(job)
            wait_until(lambda: len(losses(c, job)) == 2000, PATIENCE, "every metric, in the end")
        store = sqlite3.connect(f"file:{c.state_dir}/state.db?mode=ro", uri=True)
        down = store.execute("SELECT text FROM event WHERE kind IN ('node-down', 'node-lost')").fetchall()
        store.close()
        suspects = len(re.findall(r"is suspect", c.boostd.log_text()))
        anew = sum(len(re.findall(r"heartbeat connection is made anew", a.log_text())) for a in c.agents.values())
        print(f"# {SECONDS} s, {NODES} nodes, {LOSS_PCT} % lost: DOWN {len(down)} times, SUSPECT {suspects} times, "
              f"{anew} heartbeat connections made anew, {again} segments sent again, {len(jobs)} jobs; seen {seen}")
        assert not down and "DOWN" not in seen, (down, seen)
        assert again > SECONDS * NODES * 0.3, "so few segments sent again: the network was too good"


run(globals())
