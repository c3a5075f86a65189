"""Files of torch.save, read without executing anything: torch's own restricted reader, with inert stand-ins for some classes."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from partita.errors import CheckpointError

INERT = ("deepspeed.", "argparse.Namespace", "omegaconf.")  # classes whose instances are kept as empty shells


class Shell:
    """Stands for an object of a class that is not imported. Holds what was stored; does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = arguments
        del options

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_pickled(path: Path) -> Any:
    """The content of a file of torch.save. Raises CheckpointError where it is damaged, or asks for code to be run."""
    try:
        wanted = get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in wanted if not name.startswith(INERT)]
        if refused:
            raise CheckpointError(
                f"{path} asks for {', '.join(sorted(refused)[:5])}: reading it would run code, which is never done here. "
                "Save it again as tensors, numbers and strings only (torch.load(..., weights_only=True) must read it)."
            )
        shells: list[Any] = [(type("Shell", (Shell,), {}), name) for name in wanted]
        with safe_globals(shells):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, RuntimeError, ValueError, KeyError, IndexError, TypeError, EOFError, AttributeError, pickle.UnpicklingError,
            zipfile.BadZipFile, AssertionError, UnicodeDecodeError, OverflowError, MemoryError) as error:  # fmt: skip
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {first}") from error
