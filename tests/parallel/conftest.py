"""Tiny runs are those of tests/rl."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))
