"""Rules for operators on meta: the same shape, dtype and strides as torch's own, and no import of its compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from partita.plan.meta_rules import RULES, MetaRules

A, B, C = (3, 1, 5), (4, 5), (3, 4, 5)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


CASES = {
    "add": lambda: meta(*C) + meta(*B),
    "add with alpha": lambda: torch.add(meta(*C), meta(*C), alpha=2),
    "outer": lambda: meta(*A) * meta(*B),
    "outer of transposed": lambda: meta(*A) * meta(5, 4).t(),
    "sub of a scalar": lambda: meta(*C) - 1,
    "mul of dtypes": lambda: meta(*C) * meta(*B, dtype=torch.float64),
    "mul with a 0-d tensor": lambda: meta(*C, dtype=torch.bfloat16) * meta(),
    "div of integers": lambda: meta(4, dtype=torch.int64) / meta(4, dtype=torch.int64),
    "div": lambda: meta(4) / 2,
    "float by integers": lambda: meta(4) * meta(4, dtype=torch.int64),
    "transposed and not": lambda: meta(4, 5) + meta(5, 4).t(),
    "transposed": lambda: meta(5, 4).t() + meta(5, 4).t(),
    "rotary": lambda: (
        (meta(2, 7, 3, 8).transpose(1, 2)[..., :4]) * meta(7, 4) - meta(2, 7, 3, 8).transpose(1, 2)[..., 4:] * meta(7, 4)
    ),
    "rotary the other way": lambda: meta(7, 4) * (meta(2, 7, 3, 8).transpose(1, 2)[..., :4]),
    "equal strides": lambda: meta(1, 5).expand(3, 5).t() + meta(5, 3),
    "axes of one": lambda: meta(3, 1, 5).transpose(0, 1) * meta(3, 5),
    "nothing": lambda: meta(0, 3) + meta(3),
    "unary": lambda: F.gelu(F.silu(meta(*C).neg().cos().sin().rsqrt().tanh().sigmoid().relu())),
    "unary of transposed": lambda: meta(5, 4).t().neg(),
    "unary of a slice": lambda: meta(5, 4)[:, ::2].cos(),
    "pow": lambda: meta(*C).pow(2),
    "base": lambda: 10000.0 ** meta(7),
    "base of integers": lambda: 2 ** meta(7, dtype=torch.int64),
    "embedding": lambda: F.embedding(meta(3, 4, dtype=torch.int64), meta(10, 6)),
    "mm": lambda: meta(3, 4) @ meta(5, 4).t(),
    "linear": lambda: F.linear(meta(2, 3, 4), meta(5, 4), meta(5)),
    "linear of a row": lambda: F.linear(meta(4), meta(5, 4), meta(5)),
    "layer norm": lambda: F.layer_norm(meta(*C), (5,), meta(5), meta(5)),
    "layer norm of two": lambda: torch.native_layer_norm(meta(*C), (4, 5), None, None, 1e-5),
    "layer norm of bf16": lambda: torch.native_layer_norm(meta(*C, dtype=torch.bfloat16), (5,), None, None, 1e-5),
    "mean": lambda: meta(*C).mean(-1, keepdim=True),
    "mean without": lambda: meta(*C).mean(1),
    "mean of two": lambda: meta(*C).mean((0, 2)),
    "cat": lambda: torch.cat((meta(*C), meta(3, 4, 2)), dim=-1),
    "cat of transposed": lambda: torch.cat((meta(4, 5), meta(5, 4).t())),
    "cat with last channels": lambda: torch.cat((meta(2, 4, 5, 3).permute(0, 3, 1, 2), meta(2, 4, 5, 3).permute(0, 3, 1, 2)), 1),
    "cat of rotary": lambda: torch.cat((meta(2, 7, 3, 8).transpose(1, 2), meta(2, 7, 3, 8).transpose(1, 2)), -1),
    "cat of nothing": lambda: torch.cat((meta(0), meta(4, 5))),
    "cat of dtypes": lambda: torch.cat((meta(4), meta(4, dtype=torch.float64))),
    "arange": lambda: torch.arange(7, device="meta"),
    "arange with a start": lambda: torch.arange(2, 9, device="meta"),
    "arange with a step": lambda: torch.arange(0, 9, 2, dtype=torch.float32, device="meta"),
    "arange of floats": lambda: torch.arange(0.0, 1.0, 0.3, device="meta"),
    "arange here": lambda: torch.arange(5),
    "real tensors": lambda: torch.ones(3) + torch.ones(3),
}


def look(value: object) -> list[tuple[object, ...]]:
    values = value if isinstance(value, tuple) else (value,)
    return [(tuple(t.shape), t.dtype, t.stride(), t.device.type) for t in values if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_torch(name: str) -> None:
    usual = look(CASES[name]())
    with MetaRules():
        assert look(CASES[name]()) == usual


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: meta(3) + meta(4),
        lambda: meta(3, 4) @ meta(3, 4),
        lambda: torch.cat((meta(3, 4), meta(3, 5))),
        lambda: F.linear(meta(2, 3), meta(5, 3), meta(4)),
    ],
)
def test_what_torch_refuses_is_refused(wrong: object) -> None:
    with pytest.raises((RuntimeError, IndexError)), MetaRules():
        wrong()  # type: ignore[operator]


def test_rules_are_reached() -> None:
    seen = set()
    with MetaRules():
        rules = dict(RULES)
        for op, rule in rules.items():

            def note(*args: object, op: object = op, rule: object = rule, **kwargs: object) -> object:
                out = rule(*args, **kwargs)  # type: ignore[operator]
                seen.add(op) if out is not None else None
                return out

            RULES[op] = note
        try:
            for case in CASES.values():
                case()
        finally:
            RULES.update(rules)
    assert seen == set(rules)


@pytest.mark.parametrize("model", ["gpt", "llama", "bert"])
def test_a_plan_does_not_import_the_compiler(model: str) -> None:
    code = (
        "import sys; from partita.config.compose import compose_config, registry_for; from partita.plan.make import make_plan; "
        f"config, _ = compose_config(['model={model}', 'launch.ranks=2']); planned = make_plan(config, registry_for(())); "
        "print(planned.plan.layout.world, [n for n in ('torch._dynamo', 'sympy', 'triton') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "2 []"
