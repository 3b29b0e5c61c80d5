"""Nodes that are not fit for work: health checks, prolog and epilog, whole."""
import os, sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
from harness import Cluster, alive, run, tiny_job, wait_until
from jobs import endless, wait_event


def script(c, name, body):
    path = c.dir / name
    path.write_text(f"#!/bin/sh\ncd {c.dir} || exit 99\n{body}\n")
    path.chmod(0o755)
    return path


def node(c, name="n1"):
    return c.json("node", "show", name)["node"]


def wait_admin(c, admin, name="n1"):
    wait_until(lambda: node(c, name)["admin"] == admin, 20, f"{name} {admin}: {node(c, name)}")


def node_events(c, kind):
    return [e for e in c.json("events")["events"] if e["kind"] == kind]


def test_a_failed_check_cordons_and_a_passing_one_resumes():
    with Cluster(agents=0) as c:
        c.start_agent("n1", health_interval_ms=200,
                      health_script=script(c, "health.sh", "[ ! -e broken ] || { echo scratch disk is gone; exit 2; }"))
        c.wait_nodes(1)
        wait_admin(c, "NONE")
        running = c.submit(endless(c))
        c.wait_state(running, "RUNNING")
        (c.dir / "broken").touch()
        wait_admin(c, "CORDONED")
        n = node(c)
        assert n["admin_by"] == "health" and "scratch disk is gone" in n["reason"], n
        assert [f["check"] for f in n["failed_checks"]] == ["script"], n
        assert "| nodes 1 up, 1 cordoned |" in c.ok("status"), c.ok("status")
        assert "health       script failed: " in c.ok("node", "show", "n1")
        assert c.status(running)["state"] == "RUNNING"  # what runs goes on
        waits = c.submit(tiny_job(c, steps=5))
        assert c.status(waits)["state"] == "QUEUED"
        (c.dir / "broken").unlink()
        c.wait_state(waits, "COMPLETED")
        assert node(c)["admin"] == "NONE" and "failed_checks" not in node(c), node(c)
        assert len(node_events(c, "node-cordoned")) == len(node_events(c, "node-resumed")) == 1
        # An operator's cordon is the operator's.
        c.ok("node", "cordon", "n1", "--reason", "new cables")
        (c.dir / "broken").touch()
        wait_until(lambda: node(c).get("failed_checks"), 20, "the check fails")
        (c.dir / "broken").unlink()
        wait_until(lambda: not node(c).get("failed_checks"), 20, "the check passes")
        assert node(c)["reason"].startswith("new cables"), node(c)


def test_a_node_gets_nothing_before_its_first_check_has_ended():
    with Cluster(agents=0, cpu_slots=1) as c:
        c.start_agent("n1", health_script=script(c, "health.sh", "while [ ! -e go ]; do sleep 0.02; done"))
        c.wait_nodes(1)
        job = c.submit(tiny_job(c, steps=5))
        n = node(c)
        assert n["admin"] == "CORDONED" and n["health_pending"], n
        assert "its check has not ended" in c.ok("node", "show", "n1")
        assert c.status(job)["state"] == "QUEUED"
        (c.dir / "go").touch()
        c.wait_state(job, "COMPLETED")
        assert not node_events(c, "node-cordoned")


def test_a_node_whose_prolog_fails_is_passed_over():
    with Cluster(agents=0, cpu_slots=1) as c:
        c.start_agent("n1", prolog=script(c, "prolog.sh", "[ -e mended ] || { echo no scratch; exit 32; }"))
        c.wait_nodes(1)
        job = c.submit(tiny_job(c, steps=5))
        wait_admin(c, "CORDONED")
        n = node(c)
        assert "prolog: " in n["reason"] and n["reason"].endswith(": no scratch"), n
        refused = wait_event(c, job, "attempt-refused")
        assert "no scratch" in refused["text"] and "no restart used" in refused["text"], refused
        c.start_agent("n2")
        row = c.wait_state(job, "COMPLETED")
        assert row["nodes"] == ["n2"], row
        assert c.json("show", job)["restarts_used"] == 0
        (c.dir / "mended").touch()
        c.ok("node", "resume", "n1")
        wait_admin(c, "NONE")


def test_an_epilog_that_hangs_cordons_and_gives_the_devices_back():
    with Cluster(agents=0, cpu_slots=1) as c:
        hangs = script(c, "epilog.sh", "trap '' TERM; echo $$ >epilog.pid; echo waiting for the moon; sleep 600")
        c.start_agent("n1", epilog=hangs, epilog_timeout_ms=2500)
        c.wait_nodes(1)
        job = c.submit(tiny_job(c, steps=5))
        c.wait_state(job, "COMPLETED")  # waits for no script
        n = node(c)
        assert n["devices_busy"] == 1 and "the epilog of" in n["reason"], n
        wait_admin(c, "CORDONED")
        n = node(c)
        assert "not over after 2.5 s, killed: waiting for the moon" in n["reason"], n
        wait_until(lambda: node(c)["devices_busy"] == 0, 20, "the devices are free")
        assert not alive(int((c.dir / "epilog.pid").read_text()))


def test_the_nodes_environment_reaches_the_ranks():
    with Cluster(agents=0, cpu_slots=1) as c:
        c.start_agent("n1", env='{key: "NCCL_SOCKET_IFNAME" value: "eth7"}', label='{key: "rack" value: "r1"}',
                      switch="leaf1")
        c.wait_nodes(1)
        n = node(c)
        assert n["env"] == {"NCCL_SOCKET_IFNAME": "eth7"} and n["labels"] == {"rack": "r1"}, n
        assert n["switch"] == "leaf1", n
        line = next(x for x in c.ok("-o", "wide", "node", "ls").splitlines() if x.startswith("n1 "))
        assert "leaf1" in line and "rack=r1" in line, line
        job = c.submit(endless(c))
        c.wait_state(job, "RUNNING")
        pid = c.rank_pids(job, 1)[0]
        assert b"\0NCCL_SOCKET_IFNAME=eth7\0" in Path(f"/proc/{pid}/environ").read_bytes()


run(globals())
