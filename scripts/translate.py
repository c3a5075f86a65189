"""Print a DeepSpeed config as ours: see `partita.cli.translate`."""

import sys

from partita.cli import translate

if __name__ == "__main__":
    sys.exit(translate())
