"""Export a run for Hugging Face: python scripts/export.py RUN_FOLDER OUT_FOLDER."""

import sys

from partita.cli import export

if __name__ == "__main__":
    sys.exit(export())
