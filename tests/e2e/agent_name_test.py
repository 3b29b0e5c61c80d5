#!/usr/bin/env python3
"""An agent that comes back under another node name, as with a changed host name: what runs there is not lost."""
import subprocess
from harness import BIN, alive, run, wait_until
from jobs import Shared, ended, endless, rank_step, wait_rank_step

shared = Shared(cpu_slots=2, agents=0)


def begin(c, name="n1"):
    """The agent of the one state directory of this cluster, under that name."""
    return c.start_agent("n1", node=name)


def refused(c, *options):
    p = subprocess.run([BIN / "boost-agent", "--config", "/dev/null", "--state-dir", c.dir / "agent-n1", *options,
                        "--set", "nvml_library="], env=c.env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                       timeout=20)
    assert p.returncode == 5 and not p.stdout, p
    return p.stderr


@shared
def test_a_new_name_waits_for_what_the_old_one_began(c):
    begin(c)
    job = c.submit(endless(c, tp=2))
    c.wait_state(job, "RUNNING")
    pids, keeper = c.rank_pids(job, 1), c.keeper_pid(job, 1)
    assert c.agents["n1"].terminate() == 0
    text = refused(c, "--node", "n9")
    for part in (f"attempt {job}.1 of node n1 runs", str(c.dir / "agent-n1"), "this agent is node n9", "--node n1",
                 "--state-dir"):
        assert part in text, text
    assert "(the host name)" in refused(c)
    assert len(pids) == 2 and all(map(alive, pids.values())) and alive(keeper)
    wait_rank_step(c, job, 1, rank_step(c, job, 1) + 5)
    begin(c)
    seen = c.status(job)["step"]
    c.wait_step(job, seen + 5)
    row = c.status(job)
    assert row["state"] == "RUNNING" and row["attempt"] == 1, row
    assert c.rank_pids(job, 1) == pids
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")
    assert ended(pids.values())
    wait_until(lambda: not alive(keeper), 5, "the keeper to be gone")
    assert c.agents["n1"].terminate() == 0
    assert begin(c, "n9").ready_line == "boost-agent ready node=n9"


@shared
def test_what_does_not_run_holds_no_name(c):
    c.boostd.kill9()
    c.start_boostd(heartbeat_ms=100, suspect_ms=700, node_timeout_ms=1500, restart_grace_ms=500)
    c.wait_nodes(1)
    job = c.submit(endless(c, tp=2, name="killed"))
    c.wait_state(job, "RUNNING")
    pids = [*c.rank_pids(job, 1).values(), c.keeper_pid(job, 1)]
    c.agents["n1"].kill9()
    for pid in reversed(pids):
        subprocess.run(["kill", "-9", str(pid)], check=False)
    wait_until(lambda: not any(map(alive, pids)), 10, "all to be gone")
    assert c.run_dir(job, 1).is_dir()
    # boostd takes n2 when n9, which the job is placed on, is DOWN.
    assert begin(c, "n2").ready_line == "boost-agent ready node=n2"
    wait_until(lambda: c.status(job)["attempt"] == 2 and c.status(job)["state"] == "RUNNING", 20, "attempt 2")


test_nothing_is_left = shared.last

run(globals())
