"""Measure this machine, so that plans for it rest on what it reaches: python scripts/calibrate.py [launch.ranks=4]."""

import sys

from partita.cli import calibrate

if __name__ == "__main__":
    sys.exit(calibrate())
