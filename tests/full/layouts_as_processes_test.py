#!/usr/bin/env python3
# time limit: 1800
"""The covering list of layouts with at least 24 of its cells as real processes over Gloo."""
import os
from pathlib import Path

program = Path(os.environ["BOOST_BIN"]).parent / "tests/worker/layouts_test"
os.execve(program, [str(program)], dict(os.environ, BOOST_LAYOUTS="100"))
