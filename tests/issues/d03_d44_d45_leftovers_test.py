#!/usr/bin/env python3
"""D3, D44, D45: what ranks have started is gone before the next attempt begins, whoever died and wherever it had gone to:
loaders in sessions of their own keep a file open and a lock held, as they would a GPU and a port."""
import os, signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, Process, alive, run, wait_until
from jobs import endless, wait_committed

# The lock is the loader's: a rank that cannot have it ends with 9, which costs a restart.
WORKER = """#!/bin/sh
[ "$1" = --check-cuda ] && exit 0
[ "$1" = ckpt ] && exec "{worker}" "$@"
exec 9>>"{dir}/device"
flock -n 9 || {{ echo "the device is taken"; exit 9; }}
{how} sh -c 'echo $$ >>"{dir}/loaders"; exec sleep 1000' &
while [ ! -s "{dir}/loaders" ]; do sleep 0.01; done
exec 9>&-
exec "{worker}" "$@"
"""


class WithLoaders(Cluster):
    """Ranks that start a loader each, by `how`; its descriptor 9 is the device."""

    def __init__(self, how, **options):
        self.how = how
        super().__init__(agents=1, cpu_slots=1, **options)

    def start_agent(self, name, **sets):
        worker = self.dir / "worker.sh"
        if not worker.exists():
            worker.write_text(WORKER.format(dir=self.dir, how=self.how, worker=BIN / "boost-worker"))
            worker.chmod(0o755)
        argv = [BIN / "boost-agent", "--config", "/dev/null", "--state-dir", self.dir / f"agent-{name}", "--node", name,
                "--cpu-slots", "1", "--worker", worker]
        for key, value in {**self.agent_set, **sets}.items():
            argv += ["--set", f"{key}={value}"]
        self.agents[name] = Process(argv, self.dir / f"agent-{name}.log", self.env)
        self._procs.append(self.agents[name])
        return self.agents[name]

    def loaders(self):
        path = self.dir / "loaders"
        return [int(x) for x in path.read_text().split()] if path.exists() else []

    def holders(self):
        """Who has the device open."""
        found, path = [], str(self.dir / "device")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if any(os.readlink(f"/proc/{pid}/fd/{fd}") == path for fd in os.listdir(f"/proc/{pid}/fd")):
                    found.append(int(pid))
            except OSError:
                pass
        return found


def test_d45_a_loader_in_its_own_session_and_without_environment_ends_with_its_rank():
    with WithLoaders("setsid env -i PATH=\"$PATH\"") as c:
        job = c.submit(endless(c))
        c.wait_state(job, "RUNNING")
        loader, = c.loaders()
        assert alive(loader) and c.holders() == [loader], (loader, c.holders())
        c.ok("cancel", job)
        c.wait_state(job, "CANCELLED")
        assert not alive(loader) and not c.holders(), "gone before the job was over"


def test_d03_d44_the_keeper_dies_and_the_next_attempt_finds_the_device_free():
    with WithLoaders("setsid") as c:
        job = c.submit(endless(c, every=10))
        wait_committed(c, job, 10)
        loader, = c.loaders()
        os.kill(c.keeper_pid(job, 1), signal.SIGKILL)
        wait_until(lambda: (c.status(job).get("attempt") or 0) == 2 and c.status(job)["state"] == "RUNNING", 30, "attempt 2")
        assert not alive(loader) and c.holders() == c.loaders()[1:], (loader, c.holders(), c.loaders())
        assert c.json("show", job)["restarts_used"] == 0


def test_d44_agent_and_keeper_die_and_the_new_agent_cleans_up():
    with WithLoaders("setsid") as c:
        job = c.submit(endless(c, every=10))
        wait_committed(c, job, 10)
        loader, = c.loaders()
        c.agents["n1"].kill9()
        os.kill(c.keeper_pid(job, 1), signal.SIGKILL)
        assert alive(loader)
        c.start_agent("n1")
        wait_until(lambda: (c.status(job).get("attempt") or 0) == 2 and c.status(job)["state"] == "RUNNING", 30, "attempt 2")
        assert not alive(loader) and c.holders() == c.loaders()[1:], (loader, c.holders(), c.loaders())


run(globals())
