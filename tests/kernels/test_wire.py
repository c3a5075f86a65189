"""int8 and one-bit formats: error bounds, bit layout, error feedback, odd lengths, bad numbers; all implementations give the same bits."""

from __future__ import annotations

import pytest
import torch
from numbers64 import BF16, F16, F32, fresh, mixed

import partita_kernels as kernels
from partita_kernels import (
    dequantize_blocks_,
    dequantize_int8,
    pack_signs,
    quantize_blocks,
    quantize_blocks_,
    quantize_int8,
    unpack_signs,
)

LENGTHS = [0, 1, 15, 256, 1000, 4099]
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16])


@pytest.mark.parametrize(("dtype", "block"), [(F32, 16), (BF16, 256), (F16, 4096)])
def test_int8_error_is_half_a_step(dtype, block, device):
    for n in LENGTHS:
        x = fresh((n,), dtype, device) * 5
        q, scales = quantize_int8(x, block)
        y = dequantize_int8(q, scales, torch.empty(n, device=device), block)
        each = scales.repeat_interleave(block)[:n]
        assert ((x.float() - y).abs() <= each * 0.50001).all(), n
        assert q.abs().max().item() == 127 if n else q.numel() == 0, n


STEPS = {"int4": lambda v, s: s * 0.5, "fp8_e4m3": lambda v, s: (v.abs() / 16).maximum(s * 2.0**-10)}
STEPS["fp8_e5m2"] = lambda v, s: (v.abs() / 8).maximum(s * 2.0**-17)


@pytest.mark.parametrize(("format", "dtype", "block"), mixed(list(STEPS), [F32, BF16], [256, 16, 4096]))
def test_other_formats_err_by_half_a_step(format, dtype, block, device):
    for n in (0, 1, 15, 1000, 4099):
        x = fresh((n,), dtype, device) * 5
        codes, scales = quantize_blocks(x, format, block)
        y = torch.empty(n, device=device)
        dequantize_blocks_([codes], [scales], [y], format, block)
        each = scales.repeat_interleave(block)[:n]
        assert ((x.float() - y).abs() <= STEPS[format](x.float(), each) * 1.0001).all(), n
        with kernels.using("reference"):
            want, sizes = quantize_blocks(x, format, block)
            back = torch.empty(n, device=device)
            dequantize_blocks_([codes], [scales], [back], format, block)
        torch.testing.assert_close(scales, sizes)
        # Products next to a tie, which short inputs often give, may fall either way.
        assert (codes.view(torch.uint8) != want.view(torch.uint8)).sum() <= 2 + 0.01 * n
        assert ((y - back).abs() > 1e-6 * back.abs()).sum() <= 2 + 0.01 * n


@pytest.mark.parametrize("format", ["int8", *STEPS])
def test_several_tensors_in_one_call(format, device):
    xs = [fresh((n,), BF16, device) for n in (5000, 0, 3, 4096)]
    alone = [quantize_blocks(x, format) for x in xs]
    codes, scales = [torch.empty_like(c) for c, _ in alone], [torch.empty_like(s) for _, s in alone]
    quantize_blocks_(xs, codes, scales, format)
    outs = [x.clone() for x in xs]
    dequantize_blocks_(codes, scales, outs, format, add=True)
    for x, (c, s), code, scale, out in zip(xs, alone, codes, scales, outs):
        assert torch.equal(c.view(torch.uint8), code.view(torch.uint8))
        assert torch.equal(s, scale)
        y = torch.empty(x.numel(), device=device)
        dequantize_blocks_([c], [s], [y], format)
        torch.testing.assert_close(out, (x.float() + y).to(BF16))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_all_8_bit_floats_come_back(format, device):
    """Each code of the format, with the largest so that the scale is 1."""
    dtype, top = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}[format]
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    x = torch.where(every.isfinite(), every, top).to(device)
    codes, scales = quantize_blocks(x, format, 256)
    assert scales.tolist() == [1.0]
    y = torch.empty(256, device=device)
    dequantize_blocks_([codes], [scales], [y], format)
    assert torch.equal(y, x)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_8_bit_floats_round_as_torch_does(format, device):
    """All values of the format, what lies in the middle of two, and the float32 numbers next to these: with a scale of 1."""
    dtype, top = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}[format]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].unique()
    values = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.rand(2000) * 2.0 ** torch.randint(-20, 8, (2000,))])
    values = torch.cat([values, *(values.nextafter(torch.tensor(to)) for to in (-top, top))])
    x = values[values != 0].view(-1)  # a zero has a sign or none
    x = torch.nn.functional.pad(x, (0, -len(x) % 15), value=1.0).view(-1, 15)
    x = torch.cat([torch.full((len(x), 1), top), x], 1).view(-1).to(device)
    codes, scales = quantize_blocks(x, format, 16)
    assert (scales == 1).all()
    assert torch.equal(codes.view(torch.uint8), x.cpu().to(dtype).view(torch.uint8).to(device))


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


@pytest.mark.parametrize(("dtype", "block"), [(F32, 64), (BF16, 1024), (F16, 64), (F32, 1024)])
def test_signs(dtype, block, device):
    for n in LENGTHS:
        x, error = fresh((n,), dtype, device), fresh((n,), F32, device)
        v = x.float() + error
        bits, scales = pack_signs(x, error, block)
        out = unpack_signs(bits, scales, torch.zeros(n, device=device), block)
        assert bits.numel() == -(-n // 8)
        assert torch.equal(out >= 0, v >= 0), n
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
        lambda: quantize_blocks(x, "int5"),
        lambda: quantize_blocks_([x], [x], [x]),
        lambda: dequantize_int8(torch.zeros(31, dtype=torch.int8), torch.zeros(1), x),
        lambda: pack_signs(x, torch.zeros(3)),
        lambda: unpack_signs(torch.zeros(9, dtype=torch.uint8), torch.zeros(1), x),
    ):
        with pytest.raises(ValueError):
            call()
