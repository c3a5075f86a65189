"""Show the plan of the same arguments, without devices: python scripts/plan.py +strategy=zero3 cluster=dgx_h100."""

import sys

from partita.cli import plan

if __name__ == "__main__":
    sys.exit(plan())
