"""What the tests of models share. Helpers are in small_models.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_models import VOCAB


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids [3, 16]."""
    return torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(1))
