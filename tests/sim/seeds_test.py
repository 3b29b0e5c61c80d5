#!/usr/bin/env python3
"""The first 2,000 seeds of the simulator hold, and a seed is the same whenever it is run."""
# time limit: 200
import os, subprocess, sys
from pathlib import Path

ROOT = Path(os.environ.get("BOOST_ROOT", Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import harness

BUILD = Path(os.environ["BOOST_BIN"]).parent if "BOOST_BIN" in os.environ else ROOT / "build"
SIMULATOR = str(BUILD / "sim" / "simulator")

def simulate(*options):
    return subprocess.run([SIMULATOR, *options], capture_output=True, text=True, timeout=180)

def test_2000_seeds_hold():
    run = simulate("--seeds", "1", "2000")
    print("# " + run.stdout.strip().replace("\n", "\n# "))
    assert run.returncode == 0, run.stdout + run.stderr

def test_a_seed_is_the_same_whenever_it_is_run():
    together = simulate("--seeds", "1", "20", "--digest").stdout.splitlines()[:20]
    for line in together[::5]:
        seed = line.split()[0]
        assert simulate("--seed", seed, "--digest").stdout.splitlines()[0] == line
    assert len({line.split()[1] for line in together}) == 20

def test_a_trace_changes_nothing():
    plain = simulate("--seed", "7", "--digest").stdout.splitlines()[0]
    traced = simulate("--seed", "7", "--digest", "--trace").stdout.splitlines()
    assert plain in traced and len(traced) > 50

def test_usage():
    assert simulate("--seeds", "1").returncode == 2

harness.run(globals())
