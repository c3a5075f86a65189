"""Fixtures `registry`, `make_config`, `plan_of`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from planning import make_config, plan_of, registry  # noqa: F401
