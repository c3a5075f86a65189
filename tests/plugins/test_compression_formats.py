"""Formats that have no kernel of their own."""

from __future__ import annotations

import pytest
import torch

from partita_compression.formats import CASTS, Blocks, Format, Stochastic, TopK

CPU = torch.device("cpu")


def there_and_back(format: Format, x: torch.Tensor, *, add: bool = False) -> torch.Tensor:
    """Through a packet."""
    packet, out = torch.empty(format.size(x.numel()), dtype=torch.uint8), torch.ones_like(x) if add else torch.empty_like(x)
    format.encode(x, packet)
    format.decode(packet, out, add=add)
    return out


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("n", [1, 256, 1001])
def test_random_rounding_is_right_on_average(name: str, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    format, nearest = Stochastic(name, CPU), Blocks(name, name)
    format.begin(3)
    tries = torch.stack([there_and_back(format, x) for _ in range(400)])
    scale = x.abs().max() / {"int8": 127, "int4": 7}[name]
    assert (tries - x).abs().max() <= scale * 1.001  # the neighbours on both sides
    assert (tries.mean(0) - x).abs().max() < scale * 0.15
    assert (there_and_back(nearest, x) - x).abs().max() <= scale * 0.501
    format.begin(3)
    assert torch.equal(there_and_back(format, x), tries[0])
    assert not there_and_back(format, torch.full((n,), torch.inf)).isfinite().any()


@pytest.mark.parametrize("n", [1, 1000, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_keeps_the_largest_of_each_block(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype)
    format = TopK(0.01)
    got = there_and_back(format, x)
    for block, kept in zip(x.split(1024), got.split(1024), strict=True):
        chosen = kept != 0
        assert int(chosen.sum()) == min(10, block.numel())
        assert torch.equal(kept[chosen], block[chosen])
        assert not (~chosen).any() or block[~chosen].abs().max() <= block[chosen].abs().min()
    torch.testing.assert_close(there_and_back(format, x, add=True), (got.float() + 1).to(dtype))
    assert format.size(2500) == 3 * 10 * 6


def test_casts_are_those_of_torch() -> None:
    x = torch.randn(77)
    for name, format in CASTS.items():
        assert torch.equal(there_and_back(format, x), x.to(getattr(torch, name)).float())
