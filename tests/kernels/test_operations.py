"""Operations as torch and third parties see them: replaced by others, traced, on the meta device."""

from __future__ import annotations

import pytest
import torch
from numbers64 import BF16, F32, fresh
from torch._subclasses.fake_tensor import FakeTensorMode

import partita_kernels as kernels

LABELS = torch.tensor([1, -100, 3])


def calls(device, dtype):
    """Name -> (torch operation, arguments) for every registered operation that layers use."""
    x, g, w, wide = (fresh(s, dtype, device).requires_grad_() for s in ((3, 8), (3, 8), (8,), (5, 8)))
    heads = fresh((1, 2, 3, 8), dtype, device).requires_grad_()
    cos, sin = kernels.rope_angles(torch.arange(3, device=device), 8)
    y = LABELS.to(device)
    ops = torch.ops.partita
    gates, choices = torch.rand(3, 2, device=device).requires_grad_(), torch.tensor([[2, 0], [0, -1], [2, 2]], device=device)
    kernels.dispatch.load_all()
    order, weight = kernels.expert_order(choices, 3), fresh((3, 8, 4), dtype, device).requires_grad_()
    bounds = kernels.visible(torch.arange(3, device=device), torch.arange(3, device=device))
    rows = fresh((6, 8), dtype, device).requires_grad_()
    return {
        "rms_norm": (ops.norm, (x, None, w, None, 1e-5, False)),
        "add_layer_norm": (ops.norm, (x, g, w, w.detach().clone().requires_grad_(), 1e-5, True)),
        "glu": (ops.glu, (x, g, 0)),
        "glu_halves": (ops.glu_halves, (x, 0)),
        "rope": (ops.rope, (heads, cos, sin, False)),
        "cross_entropy": (ops.cross_entropy, (x, y, -100, 0.1, 0.01)),
        "route": (ops.route, (x, w.detach().float(), 2, 2, 4, 2, 2.5)),
        "expert_order": (ops.expert_order, (choices, 3)),
        "permute": (ops.permute, (x, *order[:2], gates)),
        "unpermute": (ops.unpermute, (rows, *order[:2], gates)),
        "grouped_matmul": (ops.grouped_matmul, (rows, weight, order.sizes)),
        "attention": (ops.attention, (heads, heads[:, :1], heads[:, :1], *bounds, 0.5)),
        "linear_cross_entropy": (ops.linear_cross_entropy, (x, wide, y, -100, 0.1, 0.01, True, True)),
    }


NAMES = [
    "rms_norm", "add_layer_norm", "glu", "glu_halves", "rope", "cross_entropy", "linear_cross_entropy", "route", "expert_order", "permute", "unpermute",
    "grouped_matmul", "attention",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_registration(name, dtype, device):
    """torch's own check of schema, fake and autograd registration."""
    kernels.dispatch.load_all()
    kernels.linear_cross_entropy  # noqa: B018 - registers it
    op, arguments = calls(device, dtype)[name]
    torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_compiled_graph_has_the_operations_whole(device):
    seen = []

    def collect(graph, inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    def layer(x, w):
        return kernels.swiglu(kernels.rms_norm(x, w), x)

    x, w = fresh((3, 8), F32, device), fresh((8,), F32, device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=collect, fullgraph=True)
    torch.testing.assert_close(compiled(x, w), layer(x, w))
    assert any("partita" in name and "norm" in name for name in seen), seen
    assert any("partita" in name and "glu" in name for name in seen), seen


def test_shapes_on_fake_tensors():
    with FakeTensorMode():
        x, w = torch.empty(4, 6, dtype=BF16), torch.empty(6)
        assert kernels.rms_norm(x, w).dtype == BF16
        y, total = kernels.add_rms_norm(x, x, w)
        assert y.shape == total.shape == (4, 6)
        assert kernels.cross_entropy(x, torch.zeros(4, dtype=torch.int64))[0].shape == ()


def test_a_replacement_takes_the_place_of_an_operation():
    seen = []
    kernels.replace("squared_norm", lambda tensors: seen.append(len(tensors)) or torch.tensor(7.0))
    try:
        assert kernels.squared_norm([torch.ones(3)]).item() == 7.0
    finally:
        kernels.replace("squared_norm", None)
    assert seen == [1]
    assert kernels.squared_norm([torch.ones(3)]).item() == pytest.approx(3.0, rel=1e-6)
    with pytest.raises(KeyError, match="squared_norm"):
        kernels.replace("no_such", None)


def test_unknown_names_and_modes():
    with pytest.raises(AttributeError, match="no_such"):
        kernels.no_such  # noqa: B018
    with pytest.raises(ValueError, match="no kernel mode"), kernels.using("fast"):
        pass
