"""Train: python scripts/train.py +strategy=zero3 parallel=3d."""

import sys

from partita.cli import train

if __name__ == "__main__":
    sys.exit(train())
