"""Fixtures `registry`, `make_config`, `plan_of`, as the tests of plans have them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from planning import make_config, plan_of, registry  # noqa: F401
