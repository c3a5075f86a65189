"""Convert a foreign checkpoint: python scripts/convert.py SOURCE OUT [--model gpt] [--safetensors]."""

import sys

from partita.cli import convert

if __name__ == "__main__":
    sys.exit(convert())
