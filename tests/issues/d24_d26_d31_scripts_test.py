#!/usr/bin/env python3
"""D24, D26, D31: a prolog or epilog is over when its process is, whatever its children do with its pipe, and a node that it
takes out says why: how it ended, after how long, and its last words."""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import Cluster, run, tiny_job, wait_until


def script(c, name, body):
    path = c.dir / name
    path.write_text(f"#!/bin/sh\ncd {c.dir} || exit 99\n{body}\n")
    path.chmod(0o755)
    return path


def test_d31_children_that_keep_the_pipe_and_defunct_ones_are_not_waited_for():
    with Cluster(agents=0, cpu_slots=1) as c:
        # One that writes for ever, one that is dead and never waited for.
        lingers = "(while :; do echo x || exit; sleep 0.05; done) & echo $! >>lingering; true & exec sh -c 'exit 0'"
        c.start_agent("n1", prolog=script(c, "prolog.sh", lingers), epilog=script(c, "epilog.sh", lingers))
        c.wait_nodes(1)
        job = c.submit(tiny_job(c, steps=5))
        c.wait_state(job, "COMPLETED", deadline=30)
        wait_until(lambda: c.json("node", "show", "n1")["node"]["devices_busy"] == 0, 10, "the epilog is over")
        assert c.json("node", "show", "n1")["node"]["admin"] == "NONE"


def test_d24_a_prolog_that_takes_its_time_is_named():
    with Cluster(agents=0, cpu_slots=1) as c:
        c.start_agent("n1", prolog=script(c, "prolog.sh", "while [ ! -e go ]; do sleep 0.02; done"))
        c.wait_nodes(1)
        job = c.submit(tiny_job(c, steps=5))
        wait_until(lambda: any(w["name"] == "prolog on n1" for w in c.json("show", job)["waits"]), 20,
                   f"the wait: {c.json('show', job)['waits']}")
        c.restart_boostd()
        wait_until(lambda: any(w["name"] == "prolog on n1" for w in c.json("show", job)["waits"]), 20, "after a restart too")
        (c.dir / "go").touch()
        c.wait_state(job, "COMPLETED", deadline=30)


def reason_of(c, body):
    with c:
        c.start_agent("n1", prolog=script(c, "prolog.sh", body), prolog_timeout_ms=2000)
        c.wait_nodes(1)
        c.submit(tiny_job(c, steps=5))
        shown = {}

        def cordoned():
            shown.update(c.json("node", "show", "n1")["node"])
            return shown["admin"] == "CORDONED"
        wait_until(cordoned, 20, "the node is cordoned")
        return shown["reason"]


def test_d26_the_reason_is_never_empty():
    for body, says in (("exit 3", r"prolog\.sh: status 3 after \d+\.\d s: it printed nothing"),
                       ("echo no scratch; kill -9 $$", r"prolog\.sh: signal 9 \(Killed\) after \d+\.\d s: no scratch"),
                       ("echo waiting; sleep 60", r"prolog\.sh: not over after 2\.0 s, killed: waiting")):
        reason = reason_of(Cluster(agents=0, cpu_slots=1), body)
        assert re.fullmatch(rf"prolog: /.*/{says}", reason), reason


run(globals())
