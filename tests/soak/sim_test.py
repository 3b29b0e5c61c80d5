#!/usr/bin/env python3
"""100,000 seeds of the simulator (BOOST_SOAK_SEEDS: another number), on all processors; BOOST_SOAK_FIRST: from which on."""
# time limit: 14400
import os, subprocess, sys
from pathlib import Path

ROOT = Path(os.environ.get("BOOST_ROOT", Path(__file__).resolve().parents[2]))
BUILD = Path(os.environ["BOOST_BIN"]).parent if "BOOST_BIN" in os.environ else ROOT / "build"

def main():
    seeds = int(os.environ.get("BOOST_SOAK_SEEDS", "100000"))
    first = int(os.environ.get("BOOST_SOAK_FIRST", "1"))
    workers = max(1, min(os.cpu_count() or 1, seeds))
    share = -(-seeds // workers)
    running = []
    for w in range(workers):
        count = min(share, seeds - w * share)
        if count > 0:
            running.append(subprocess.Popen([str(BUILD / "sim" / "simulator"), "--seeds", str(first + w * share), str(count),
                                             "--keep-going"], stdout=subprocess.PIPE, text=True))
    print(f"1..{len(running)}")
    failed = 0
    for i, child in enumerate(running, 1):
        out = child.communicate()[0]
        failed += child.returncode != 0
        print(f"{'not ok' if child.returncode else 'ok'} {i} - seeds of the simulator, part {i} of {len(running)}")
        print("# " + out.strip().replace("\n", "\n# "), flush=True)
    return 1 if failed else 0

sys.exit(main())
