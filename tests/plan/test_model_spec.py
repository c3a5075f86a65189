"""ModelSpec and the trace of activations."""

from __future__ import annotations

import pytest
import torch
from planning import Toy
from torch import nn

from partita.plan.activations import trace_activations
from partita.plan.model_spec import inspect_model


def saved_bytes(model: nn.Module, ids: torch.Tensor) -> int:
    """What autograd really keeps on the CPU, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    alive = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        key = t.untyped_storage().data_ptr()
        if key not in own and key not in seen:
            seen[key] = t.untyped_storage().nbytes()
            alive.append(t.detach())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(ids)
    return sum(seen.values())


class Odd(nn.Module):
    """0-d, empty, frozen, shared parameters and two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.blocks[1].weight = self.blocks[0].weight
        self.register_buffer("kept", torch.zeros(5))
        self.register_buffer("dropped", torch.zeros(2, dtype=torch.int64), persistent=False)


def test_odd_parameters_and_buffers():
    spec = inspect_model(Odd())
    by_name = {p.name: p for p in spec.parameters}
    assert by_name["scale"].shape == () and by_name["scale"].numel == 1
    assert by_name["empty"].numel == 0
    assert not by_name["frozen.weight"].trainable
    tied = by_name["blocks.0.weight"]
    assert tied.aliases == ("blocks.1.weight",) and tied.unit == "root", "shared by two units: of the root"
    assert spec.numel == 1 + 0 + 12 + 9 + 3 + 3
    assert spec.trainable == spec.numel - 12
    assert {b.name: (b.bytes, b.persistent) for b in spec.buffers} == {"kept": (20, True), "dropped": (16, False)}
    assert spec.buffer_bytes == 36


def test_units_cover_every_parameter_once():
    with torch.device("meta"):
        spec = inspect_model(Toy(3, 32, 4, 50))
    assert spec.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert sum(u.numel for u in spec.units) == spec.numel == sum(p.numel() for p in Toy(3, 32, 4, 50).parameters())


def test_model_without_blocks_is_all_root():
    spec = inspect_model(nn.Linear(3, 2))
    assert [(u.name, u.numel) for u in spec.units] == [("root", 8)]
    assert spec.flops_per_token(1) == 6 * 6


def test_embeddings_are_no_arithmetic_unless_tied_to_a_head():
    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(100, 4), nn.Linear(4, 100, bias=False)

    assert inspect_model(Untied()).flops_per_token(1) == 6 * 400
    tied = Untied()
    tied.head.weight = tied.embedding.weight
    assert inspect_model(tied).flops_per_token(1) == 6 * 400


def test_matching_modules_are_the_outermost():
    spec = inspect_model(Toy(2, 32, 4, 50))
    assert spec.matching_modules(("*attention*",)) == ["blocks.0.attention", "blocks.1.attention"]
    assert spec.matching_modules(("mlp",)) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert spec.matching_modules(("qkv",)) == ["blocks.0.attention.qkv", "blocks.1.attention.qkv"]
    assert spec.matching_modules(("nothing",)) == []


@pytest.mark.parametrize("shape", [(1, 7), (2, 32), (3, 50)])
def test_trace_equals_what_autograd_keeps(shape):
    torch.set_num_threads(1)
    with torch.device("meta"):
        meta = Toy(3, 32, 4, 50)
    trace = trace_activations(meta, inspect_model(meta).blocks, "root", shape, torch.float32)
    assert not trace.reason
    assert sum(u.kept for u in trace.units.values()) == saved_bytes(Toy(3, 32, 4, 50), torch.zeros(shape, dtype=torch.int64))
    assert trace.output_numel == shape[0] * shape[1] * 50


def test_trace_is_linear_in_micro_batch_and_halves_in_bf16():
    with torch.device("meta"):
        model = Toy(2, 64, 4, 50)
    blocks = inspect_model(model).blocks

    def block(batch: int, dtype: torch.dtype) -> int:
        return trace_activations(model, blocks, "root", (batch, 32), dtype).units["blocks.1"].kept

    assert block(4, torch.float32) == 2 * block(2, torch.float32)
    assert 0.5 <= block(2, torch.bfloat16) / block(2, torch.float32) < 0.52, "log-sums and statistics of norms stay in float32"


def test_trace_leaves_forwards_that_were_replaced():
    with torch.device("meta"):
        model = Toy(4, 32, 4, 50)
    for block in model.blocks[:3]:
        block.forward = block.forward  # a plug-in's own, say
    before = [vars(block).get("forward") for block in model.blocks]
    assert not trace_activations(model, inspect_model(model).blocks, "root", (2, 8), torch.float32).reason
    assert [vars(block).get("forward") for block in model.blocks] == before and before[3] is None


def test_trace_sees_unit_inputs_and_matched_modules():
    model = Toy(2, 32, 4, 50)
    trace = trace_activations(model.to("meta"), ["blocks.0", "blocks.1"], "root", (2, 8), torch.float32, ["blocks.1.attention"])
    first, second = trace.units["blocks.0"], trace.units["blocks.1"]
    assert first.input == second.input == 2 * 8 * 32 * 4
    assert first.matched == 0 and 0 < second.matched < second.kept
    assert second.matched_input == 2 * 8 * 32 * 4


def test_model_that_cant_run_on_meta_gives_a_reason():
    class Stubborn(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids + int(input_ids.sum())

    trace = trace_activations(Stubborn(), [], "root", (1, 4), torch.float32)
    assert trace.units == {} and trace.reason
