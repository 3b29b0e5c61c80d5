#!/usr/bin/env python3
"""D41: names are checked where they come in, and what a script of the site prints is text for every list: in JSON, bytes that
are none come out as U+FFFD. (Of what ranks print d37_output_flood_test.py knows.)"""
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, run, tiny_job, wait_until


def script(c, name, body):
    path = c.dir / name
    path.write_bytes(b"#!/bin/sh\n" + body + b"\n")
    path.chmod(0o755)
    return path


def test_d41_names_are_checked():
    with Cluster() as c:
        for bad in ("a b", "caf\\303\\251", "x\\377", "", "x" * 65, "a/b", "-rf\\n"):
            path = c.dir / "bad.pbtxt"
            path.write_text(tiny_job(c).replace('name: "tiny"', f'name: "{bad}"'))
            r = c.ctl("submit", path)
            assert r.rc == 6 and "name" in r.err, (bad, r)
        agent = subprocess.run([BIN / "boost-agent", "--config", "/dev/null", "--state-dir", c.dir / "x", "--node", b"n\xff"],
                               env=c.env, capture_output=True, timeout=20)
        assert agent.returncode == 2 and b"is not 1 to 64 bytes of" in agent.stderr, agent
        assert c.json("node", "ls")["nodes"][0]["name"] == "n1"


def test_d41_a_scripts_last_words_are_shown_whatever_they_are():
    with Cluster(agents=0) as c:
        c.start_agent("n1", health_script=script(c, "health.sh", rb"printf 'bad \377\303 \033[31m disk \303\251\n'; exit 1"))
        c.wait_nodes(1)

        def reason():
            return next(iter(c.json("node", "show", "n1")["node"].get("failed_checks", [])), {}).get("text")
        text = wait_until(reason, 20, "the check fails")
        assert text.endswith(": bad \ufffd\ufffd  [31m disk \u00e9"), ascii(text)
        for command in (("node", "ls"), ("-o", "wide", "node", "ls"), ("node", "show", "n1"), ("events",)):
            out = subprocess.run([BIN / "boostctl", *command], env=c.env, capture_output=True, timeout=20)
            assert out.returncode == 0, (command, out)
            out.stdout.decode()  # text for any terminal
            assert b"disk \xc3\xa9" in out.stdout and b"\x1b" not in out.stdout, (command, out.stdout)


run(globals())
