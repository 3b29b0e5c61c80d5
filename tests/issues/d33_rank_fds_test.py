#!/usr/bin/env python3
"""D33: a rank has no descriptor of its agent, of boostd, or of whoever started the agent."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, Process, run
from jobs import endless


def open_files(pid):
    out = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            out[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            pass
    return out


def test_d33_what_a_rank_and_its_keeper_have_open():
    with Cluster(agents=0) as c:
        stray = c.dir / "stray"
        stray.write_text("")
        c.agents["n1"] = Process(["sh", "-c", f'exec 7<"{stray}" 8>>"{stray}"; exec "$0" "$@"', BIN / "boost-agent",
                                  "--config", "/dev/null", "--state-dir", c.dir / "agent-n1", "--node", "n1",
                                  "--cpu-slots", "2", "--set", "nvml_library="], c.dir / "agent-n1.log", c.env)
        c._procs.append(c.agents["n1"])
        c.wait_nodes(1)
        job = c.submit(endless(c, tp=2))
        c.wait_state(job, "RUNNING")
        run_dir = str(c.run_dir(job, 1))
        mine = (run_dir, str(c.dir / "train.txt"), str(c.dir / "ckpt"), "/dev/null", "pipe:", "anon_inode:", "socket:",
                "/dev/shm", "/memfd:")
        pids = c.rank_pids(job, 1)
        for who, pid in [("keeper", c.keeper_pid(job, 1)), *((f"rank {r}", p) for r, p in pids.items())]:
            files = open_files(pid)
            foreign = {fd: f for fd, f in files.items() if not f.startswith(mine)}
            assert not foreign, f"{who} has {foreign}"
            shared = {f for f in files.values() if f.startswith("pipe:")} & set(open_files(os.getpid()).values())
            assert not shared, f"{who} holds {shared} of the starter"
            theirs = {f for d in (c.boostd, c.agents["n1"]) for f in open_files(d.pid).values()
                      if f.startswith(("socket:", "pipe:"))}
            held = {f for f in files.values() if f in theirs}
            assert not held, f"{who} holds {held} of a daemon"
            assert len(files) < 40, f"{who} has {len(files)} open files: {files}"
        both = [{f for f in open_files(pids[r]).values() if f.startswith(("pipe:", "socket:", run_dir))} for r in (0, 1)]
        assert not both[0] & both[1], f"ranks share {both[0] & both[1]}"
        for fd in (1, 2):
            assert open_files(pids[0])[fd].startswith("pipe:"), "output goes to the keeper"


run(globals())
