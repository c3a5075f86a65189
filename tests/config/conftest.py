"""Helpers are in deepspeed_files.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
