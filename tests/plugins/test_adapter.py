"""LoRA, rsLoRA and DoRA: equal to one process under every stage, the base untouched to the bit, files that peft reads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import adapter_runs
from pool import run_ranks

import partita
from partita.errors import ConfigError

ADAPTER = ["+adapter=lora", "adapter.rank=3"]


def assert_frozen(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and all("lora_" in n for n in changed), changed
    assert {n for n in before if "lora_" in n} == changed


@pytest.mark.parametrize("kind", [(), ("adapter.dora=true",)], ids=["lora", "dora"])
def test_every_stage_equals_one_process_and_leaves_the_base_alone(kind: tuple[str, ...]) -> None:
    ((losses, norms, _, weights, *_, logits),) = run_ranks(1, adapter_runs.many, [[*ADAPTER, *kind]])[0]
    cases = [[*ADAPTER, f"zero.stage={stage}", f"recompute={r}", *kind] for stage in range(4) for r in ("none", "full")]
    for rank in run_ranks(2, adapter_runs.many, cases):
        for ours in rank:
            assert ours[0] == pytest.approx(losses, rel=1e-5)
            assert ours[1] == pytest.approx(norms, rel=1e-4)
            assert_frozen(ours[2], ours[3])
            for name, value in weights.items():
                torch.testing.assert_close(ours[3][name], value, rtol=1e-5, atol=1e-6, msg=name)
            torch.testing.assert_close(ours[-1], logits, rtol=1e-4, atol=1e-4)
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------ where layers are cut

CUTS = {
    "tensor": ("zero=stage3", "parallel.data=2", "parallel.tensor=2", "recompute=full", "offload=host"),
    "sequence": ("zero=stage2", "parallel.data=2", "parallel.tensor=2", "parallel.sequence_parallel=true", "model=llama"),
    "pipeline": ("zero=stage3", "parallel.data=2", "parallel.pipeline=2", "offload=host_all"),
    "3d": ("zero=stage1", "parallel.data=1", "parallel.pipeline=2", "parallel.tensor=2", "recompute=full"),
    "dora": ("zero=stage3", "parallel.data=2", "parallel.tensor=2", "adapter.dora=true"),
    "dora sequence": ("zero=stage3", "parallel.data=1", "parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence_parallel=true", "adapter.dora=true"),
    "extra": ("zero=stage3", "parallel.data=1", "parallel.pipeline=2", "parallel.tensor=2", "adapter.extra=[norm]", "adapter.targets=[qkv,down]"),
    "nf4": ("zero=stage3", "parallel.data=2", "parallel.pipeline=2", "adapter.base=nf4", "recompute=full"),
    "int8": ("zero=stage3", "parallel.data=4", "adapter.base=int8", "precision=bf16", "offload=file_all"),
}  # fmt: skip
NUMERIC = ("adapter", "model=", "precision")  # what changes the numbers
LORA = ("+adapter=lora", "adapter.rank=3")


def check(names: list[str], cuts: dict[str, tuple[str, ...]], folder: Path) -> None:
    """Train on 4 ranks and on one, and compare."""
    specs, references = [], {}
    for name in names:
        path = [f"offload.path={folder / 'files'}"] if "file" in "".join(cuts[name]) else []
        specs.append(adapter_runs.spec_of((*LORA, *cuts[name], *path), folder / name))
        key = tuple(o for o in cuts[name] if o.startswith(NUMERIC))
        references[key] = adapter_runs.spec_of((*LORA, "parallel.data=1", *key), folder / f"one {len(references)}")
    alone = dict(zip(references, run_ranks(1, adapter_runs.play, list(references.values()))[0], strict=True))
    ranks = run_ranks(4, adapter_runs.play, specs, timeout=120)
    for i, name in enumerate(names):
        want = alone[tuple(o for o in cuts[name] if o.startswith(NUMERIC))]
        low = "bf16" in "".join(cuts[name])
        trained: set[str] = set()
        for rank in ranks:
            ours = rank[i]
            assert ours["loss"] == pytest.approx(want["loss"], rel=1e-2 if low else 1e-5), name
            assert ours["norm"] == pytest.approx(want["norm"], rel=5e-2 if low else 1e-4), name
            assert ours["frozen"] and not ours["changed"], name
            trained |= ours["trained"].keys()
            for key, value in ours["trained"].items():
                torch.testing.assert_close(value, want["trained"][key], rtol=0.1 if low else 1e-4, atol=1e-2 if low else 1e-6)
        assert trained == want["trained"].keys(), name
        assert want["loss"][-1] != want["loss"][0]
        same_files(folder / name / "adapter", want, "extra" in name)


def same_files(folder: Path, want: dict[str, Any], extra: bool) -> None:
    """The saved adapter has the tensors of all stages and all tensor ranks."""
    from safetensors.torch import load_file

    stored = load_file(folder / "adapter_model.safetensors")
    assert len(stored) == len(want["trained"])
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert len(settings["target_modules"]) == sum("lora_A" in n for n in stored)
    for name, value in want["trained"].items():
        key = "base_model.model." + name.replace(".default", "").replace("_vector.weight", "_vector")
        assert stored[key].shape == value.shape, name
    assert bool(settings["modules_to_save"]) == extra


LONG = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="more of the same: PARTITA_LONG_TESTS=1 runs it")


@pytest.mark.parametrize(
    "names",
    [["tensor", "sequence", "3d", "extra"], ["dora sequence", "nf4", "int8"], pytest.param(["pipeline", "dora"], marks=LONG)],
    ids=["lora", "others", "more"],
)
def test_cut_layers_equal_one_process(names: list[str], tmp_path: Path) -> None:
    check(names, CUTS, tmp_path)


@LONG
@pytest.mark.parametrize("stage", range(4))
def test_the_whole_product_of_stage_recompute_tensor_and_offload(stage: int, tmp_path: Path) -> None:
    cuts = {}
    for recompute in ("none", "full", "selective"):
        for offload in (
            ("none", "host", "file", "host_all") if stage == 3 else ("none", "host", "file") if stage else ("none", "host")
        ):
            for kind in ((), ("adapter.dora=true",)):
                for cut in (
                    ("parallel.tensor=2", "parallel.data=2"),
                    ("parallel.tensor=2", "parallel.pipeline=2", "parallel.data=1"),
                ):
                    name = f"{recompute} {offload} {len(kind)} {cut[1]}"
                    cuts[name] = (f"zero=stage{stage}", f"recompute={recompute}", f"offload={offload}", *kind, *cut)
    names = list(cuts)
    for at in range(0, len(names), 8):
        check(names[at : at + 8], cuts, tmp_path)


def test_it_begins_as_the_base_and_bf16_keeps_the_base_to_the_bit() -> None:
    base = run_ranks(1, adapter_runs.train, [])[0]
    for variant in ([], ["adapter.rslora=true"], ["adapter.dora=true"]):
        assert run_ranks(1, adapter_runs.train, [*ADAPTER, *variant])[0][0][0] == pytest.approx(base[0][0], rel=1e-6)
    for ours in run_ranks(2, adapter_runs.train, [*ADAPTER, "zero.stage=3", "precision=bf16"]):
        assert_frozen(ours[2], ours[3])


@pytest.mark.parametrize("dora", [False, True])
def test_trainable_elements_and_bytes_by_formula(dora: bool) -> None:
    """sum r (in + out) (+ out): gpt has qkv 16 -> 48, out 16 -> 16, up 16 -> 64, down 64 -> 16 in each of 2 blocks."""
    layers = [(16, 48), (16, 16), (16, 64), (64, 16)] * 2
    wanted = sum(3 * (i + o) + (o if dora else 0) for i, o in layers)
    for stage in range(4):
        for ours in run_ranks(2, adapter_runs.train, [*ADAPTER, f"zero.stage={stage}", f"adapter.dora={str(dora).lower()}"]):
            assert ours[5] == wanted
            allocated, planned = ours[4], ours[6]
            assert {k: allocated[k] for k in planned} == planned, stage


def test_targets_and_extra_modules() -> None:
    ours = run_ranks(1, adapter_runs.train, [*ADAPTER, "adapter.targets=[qkv]", "adapter.extra=[norm]", "adapter.rank=2"])[0]
    assert ours[5] == 2 * 2 * (16 + 48) + 2 * 16
    changed = {n for n in ours[2] if not torch.equal(ours[2][n], ours[3][n])}
    assert changed == {n for n in ours[2] if "lora_" in n or n.startswith("norm.")}


def test_a_saved_adapter_is_complete_and_loads_again(tmp_path: Path) -> None:
    """Every tensor has its full shape under stage 3, the extra module too; others over the same base switch."""
    from safetensors.torch import load_file

    runs = {}
    for label, lr in (("a", 0.1), ("b", 0.05)):
        folder = tmp_path / label
        runs[label] = run_ranks(2, adapter_runs.train, [*ADAPTER, "zero.stage=3", f"optimizer.lr={lr}"], "gpt", str(folder))[0][
            -1
        ]
    tensors = load_file(tmp_path / "a/adapter/adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 2 and all(t.numel() for t in tensors.values())
    assert tensors["base_model.model.blocks.0.attention.qkv.lora_A.weight"].shape == (3, 16)
    assert tensors["base_model.model.blocks.0.attention.qkv.lora_B.weight"].shape == (48, 3)
    settings = json.loads((tmp_path / "a/adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["peft_type"]) == (3, "LORA")
    for out in run_ranks(2, adapter_runs.again, str(tmp_path / "a/adapter"), {"second": str(tmp_path / "b/adapter")}):
        torch.testing.assert_close(out["default"], runs["a"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out["second"], runs["b"], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(out[None], runs["a"])


@pytest.mark.parametrize("dora", [False, True])
def test_peft_loads_what_is_saved_and_computes_the_same(dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    variant = ["adapter.dora=true"] if dora else ["adapter.rslora=true"]
    ours = run_ranks(2, adapter_runs.train, [*ADAPTER, "zero.stage=3", *variant], "gpt", str(tmp_path))[0]
    plain = partita.prepare(adapter_runs.model(), adapter_runs.SIZES).model
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    ids = adapter_runs.batch(99, 0, 1)
    torch.testing.assert_close(theirs(ids), ours[-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(theirs.merge_and_unload()(ids), ours[-1], rtol=1e-3, atol=1e-4)


def test_a_group_that_is_left_empty_changes_no_rate_of_others() -> None:
    """All that one group matches is frozen; the two others keep their own factors, and all follow one schedule."""
    groups = "{match:['*lora_A*'],lr_scale:1.0},{match:['*mlp.up.weight'],lr_scale:0.5},{match:['*lora_B*'],lr_scale:0.1}"
    rates = ["optimizer.name=sgd", "optimizer.lr=0.5", "optimizer.weight_decay=0", f"optimizer.groups=[{groups}]", "train.grad_clip=0",
             "lr_schedule=linear", "lr_schedule.warmup=0", "lr_schedule.minimum=0", "train.steps=4"]  # fmt: skip
    session = partita.prepare(adapter_runs.model(), [*adapter_runs.SIZES, *ADAPTER, *rates])
    for _ in range(3):
        before = session.state_dict()
        result = session.step(adapter_runs.batch(0, 0, 1), adapter_runs.loss)
        for name, value in session.state_dict().items():
            factor = 1.0 if "lora_A" in name else 0.1 if "lora_B" in name else 0.0
            want = before[name] - result.lr * factor * session.gradient(name) if factor else before[name]
            torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-8, msg=name)
    assert result.lr == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["adapter.targets=[qvk]"], "adapter.targets.*qkv"),
        (["adapter.targets=[head]"], "tied to another module"),
        (["adapter.rank=0"], "adapter.rank"),
        (["adapter.base=nf3"], "adapter.base.*nf4"),
        (["adapter.extra=[nrom]"], "adapter.extra.*norm"),
        (["adapter.path=nowhere"], "adapter.path"),
        (["adapter.name=lroa"], "lora"),
    ],
)
def test_mistakes_are_told(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        partita.prepare(adapter_runs.model(), [*adapter_runs.SIZES, *ADAPTER, *overrides])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("adapter.base=nf4", "parallel.tensor=2"), "parallel.tensor.*adapter.base=whole"),
        (("adapter.base=int8", "zero=stage3", "parallel.data=2", "compression.parameter_gather=int8"), "adapter.base.*travel as int8"),
        (("adapter.dora=true", "parallel.pipeline=2", "adapter.targets=[head]", "model.tie_embeddings=false"), "adapter.targets.*no block"),
        (("adapter.dora=true", "parallel.tensor=4", "model=llama", "model.width=32", "model.heads=4", "model.kv_heads=2",
          "parallel.replicate_kv=true"), "adapter.dora.*replicate_kv"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told(overrides: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        adapter_runs.spec_of((*LORA, *overrides), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (5, 7), (1, 1), (33, 65)])
def test_packed_matrices(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Each element comes back as the nearest of the format's values, in its block of 64; the bytes are as many as were told."""
    from partita_adapter.quantized import NF4, pack, packed_numel, unpack

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    blocks = torch.nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % 64)).view(-1, 64)
    top = blocks.abs().amax(1, keepdim=True)
    for format, values in (("nf4", torch.tensor(NF4)), ("int8", torch.arange(-127, 128) / 127)):
        packed = pack(matrix, format, dtype)
        assert packed.numel() == packed_numel(matrix.numel(), format, dtype) and packed.dtype == dtype
        nearest = values[((blocks / top).unsqueeze(-1) - values).abs().argmin(-1)] * top
        got = unpack(packed, format, shape, torch.float32)
        torch.testing.assert_close(got, nearest.flatten()[: matrix.numel()].view(shape), rtol=1e-5, atol=1e-6)
    quantiles = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    want = (quantiles / quantiles.max()).float().sort().values
    torch.testing.assert_close(torch.tensor(NF4)[8:], want, rtol=1e-5, atol=1e-6)  # of Dettmers et al. 2023, appendix E
    assert not unpack(pack(torch.zeros(shape), "nf4", dtype), "nf4", shape, dtype).any()


@pytest.mark.parametrize("model", ["gpt", "hf"])
def test_an_export_from_a_packed_base_is_the_model_that_was_trained(model: str, tmp_path: Path) -> None:
    import transformers

    from partita.models.export import export_run

    more = ("model=hf", "+model.options.model_type=gpt2", "data.tokenizer=ids") if model == "hf" else ()
    spec = adapter_runs.spec_of((*LORA, "zero=stage3", "parallel.data=2", "adapter.base=nf4", *more), tmp_path / "run")
    want = run_ranks(2, adapter_runs.logits, spec)[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run", tmp_path / "out")).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(adapter_runs.batch(99, 0, 1)).logits, want, rtol=1e-4, atol=1e-4)


def test_an_option_without_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.rank.*no effect"):
        partita.prepare(adapter_runs.model(), [*adapter_runs.SIZES, "adapter.rank=4"])
