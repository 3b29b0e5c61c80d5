#!/usr/bin/env python3
# time limit: 3600
"""Combinations of model, strategy and layout beyond the covering list, in an order that starts elsewhere each day: as
many of all as 20 minutes allow, or $BOOST_PRODUCT_SECONDS (all of them take a day on two cores)."""
import os
from pathlib import Path

program = Path(os.environ["BOOST_BIN"]).parent / "tests/worker/layouts_test"
os.execve(program, [str(program)], {"BOOST_PRODUCT_SECONDS": "1200", **os.environ})
