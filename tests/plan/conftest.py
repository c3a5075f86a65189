"""Fixtures `registry`, `make_config`, `plan_of`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from planning import make_config, plan_of, registry  # noqa: F401
