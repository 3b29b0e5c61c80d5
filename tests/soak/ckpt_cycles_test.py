#!/usr/bin/env python3
"""tests/e2e/ckpt_cycles_test.py with 1,000 checkpoints."""
# time limit: 1500
import os, runpy
from pathlib import Path

os.environ["BOOST_CKPT_CYCLES"] = "1000"
runpy.run_path(str(Path(__file__).resolve().parents[1] / "e2e" / "ckpt_cycles_test.py"), run_name="__main__")
