"""int8 and one-bit formats: error bounds, bit layout, error feedback, odd lengths, bad numbers; all implementations give the same bits."""

from __future__ import annotations

import pytest
import torch
from numbers64 import BF16, F16, F32, fresh

import partita_kernels as kernels
from partita_kernels import dequantize_int8, pack_signs, quantize_int8, unpack_signs

LENGTHS = pytest.mark.parametrize("n", [0, 1, 15, 256, 1000, 4099])
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16])


@LENGTHS
@DTYPES
@pytest.mark.parametrize("block", [16, 256, 4096])
def test_int8_error_is_half_a_step(n, dtype, block, device):
    x = fresh((n,), dtype, device) * 5
    q, scales = quantize_int8(x, block)
    y = dequantize_int8(q, scales, torch.empty(n, device=device), block)
    each = scales.repeat_interleave(block)[:n]
    assert ((x.float() - y).abs() <= each * 0.50001).all()
    assert q.abs().max().item() == 127 if n else q.numel() == 0


@DTYPES
def test_int8_adds(dtype, device):
    x, start = fresh((777,), dtype, device), fresh((777,), dtype, device)
    q, scales = quantize_int8(x)
    out = dequantize_int8(q, scales, start.clone(), add=True)
    want = start.float() + dequantize_int8(q, scales, torch.empty(777, device=device))
    torch.testing.assert_close(out, want.to(dtype))  # a device may contract the product and the sum


def test_int8_bits_are_those_of_the_reference(device):
    x = fresh((5000,), F32, device)
    x[:256] = 0
    x[256:512] *= 1e-38
    x[512:768] = torch.arange(256) - 127.5  # ties
    got = quantize_int8(x)
    with kernels.using("reference"):
        want = quantize_int8(x)
    assert torch.equal(got[1], want[1])
    # Products next to a tie may fall either way where a device contracts or divides otherwise.
    assert ((got[0].int() - want[0].int()).abs() <= 1).all()
    assert (got[0] != want[0]).sum() <= 2
    assert got[0][:512].abs().sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_number_spoils_its_block_only(bad, device):
    x = fresh((1000,), F32, device)
    x[300] = bad
    q, scales = quantize_int8(x)
    y = dequantize_int8(q, scales, torch.empty_like(x))
    assert y[256:512].isnan().all()
    assert y[:256].isfinite().all()
    bits, scales = pack_signs(x, block=256)
    y = unpack_signs(bits, scales, torch.empty_like(x), block=256)
    assert not y[256:512].isfinite().any()
    assert y[512:].isfinite().all()


@LENGTHS
@DTYPES
@pytest.mark.parametrize("block", [64, 1024])
def test_signs(n, dtype, block, device):
    x, error = fresh((n,), dtype, device), fresh((n,), F32, device)
    v = x.float() + error
    bits, scales = pack_signs(x, error, block)
    out = unpack_signs(bits, scales, torch.zeros(n, device=device), block)
    assert bits.numel() == -(-n // 8)
    assert torch.equal(out >= 0, v >= 0)
    torch.testing.assert_close(out + error, v, rtol=1e-5, atol=1e-6)  # what was sent and what is kept make up the input
    for i, part in enumerate(v.double().split(block) if n else ()):
        torch.testing.assert_close(scales[i].double(), part.abs().mean(), rtol=1e-6, atol=0)


def test_sign_bits_are_little_endian_and_end_in_zeros(device):
    x = torch.tensor([1.0, -1, 1, 1, -1, -1, -1, -1, 1, 1], device=device)
    bits, scales = pack_signs(x, block=16)
    assert bits.tolist() == [0b00001101, 0b11]
    assert unpack_signs(bits, scales, torch.ones(10, device=device), block=16, add=True).tolist() == (x + 1).tolist()


def test_shapes_that_do_not_fit_are_refused(device):
    x = torch.zeros(32, device=device)
    for call in (
        lambda: quantize_int8(x.view(4, 8)),
        lambda: quantize_int8(x, 24),
        lambda: quantize_int8(x[::2]),
        lambda: dequantize_int8(torch.zeros(31, dtype=torch.int8), torch.zeros(1), x),
        lambda: pack_signs(x, torch.zeros(3)),
        lambda: unpack_signs(torch.zeros(9, dtype=torch.uint8), torch.zeros(1), x),
    ):
        with pytest.raises(ValueError):
            call()
