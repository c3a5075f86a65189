"""DeepSpeed configs: reading, key by key, what several keys decide together, and how they meet the command line."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import FILES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.config.compose import compose_config, registry_for
from partita.config.deepspeed import hjson
from partita.config.deepspeed.apply import apply, native_of, translate_source
from partita.config.deepspeed.report import FILLED, REFUSED, TAKEN, UNNEEDED, Translation
from partita.config.deepspeed.walk import TABLE, translate
from partita.config.plain import root_type
from partita.config.schema import LrScheduleConfig
from partita.errors import ConfigError
from partita.train import counted_schedules

ROOT = Path(__file__).parents[2]
Tree = dict[str, Any]


def translated(tree: Tree, *overrides: str) -> Translation:
    """The translation of a tree, without a file."""
    config, _ = compose_config(list(overrides))
    said = frozenset(o.partition("=")[0] for o in overrides)
    return translate(tree, "test", native_of(config, registry_for(()), said))


def line(translation: Translation, path: str) -> Any:
    """The one line about a key."""
    (found,) = [x for x in translation.lines if x.path == path]
    return found


def write(folder: Path, tree: Tree | str, name: str = "ds.json") -> str:
    """A file with a config; its path."""
    path = folder / name
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return str(path)


def refusal(tree: Tree) -> dict[str, str]:
    """Refused key -> reason and remedy."""
    return {x.path: f"{x.why} -> {x.remedy}" for x in translated_once(tree).of(REFUSED)}


# ------------------------------------------------------------------ reading


def test_comments_commas_bare_words_and_a_bom_are_read() -> None:
    text = "\ufeff\n// a\n{ 'a': 5e8, # b\r\n  b: [1, 2,], /* c\n */ \"c\": CONFIG_X,\n d: ${VAR}, e: true }"
    value = hjson.parse(text)
    assert value == {"a": 5e8, "b": [1, 2], "c": "CONFIG_X", "d": "${VAR}", "e": True}
    assert isinstance(value["c"], hjson.Bare) and isinstance(value["b"][0], int)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is missing at the end"),
        ('{"a" 1}', "a colon must follow"),
        ('{"a": "x\n"}', "a quote is not closed"),
        ('{"a": 1} x', "follows the end"),
        ("/* x", "is not closed"),
        ("[" * 80, "nested more than"),
        ('{"a": "\\q"}', "is no escape"),
        ('{"a": }', "a value is missing"),
    ],
)
def test_broken_text_is_told_with_line_and_column(text: str, says: str) -> None:
    with pytest.raises(hjson.HjsonError, match="line") as caught:
        hjson.parse(text)
    assert says in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))  # fmt: skip
def test_all_json_is_read_as_json(value: Any) -> None:
    assert hjson.parse(json.dumps(value)) == value
    assert hjson.parse(json.dumps(value, indent=1, ensure_ascii=False).replace("\n", "\r\n")) == value


@pytest.mark.parametrize("name", ["ds.json", "ds.yaml"])
def test_a_key_that_stands_twice_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{"zero_optimization": {"stage": 1, "stage": 2}}', name)
    with pytest.raises(ConfigError, match=r"stage.*stands twice"):
        compose_config([f"deepspeed={path}"])


def test_json_yaml_and_base64_give_the_same(tmp_path: Path) -> None:
    tree = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    text = json.dumps(tree)
    yaml = "train_batch_size: 8\nzero_optimization:\n  stage: 2\ngradient_clipping: 0.5\n"
    sources = [write(tmp_path, text), write(tmp_path, yaml, "ds.yml"), write(tmp_path, text, "noending"),
               base64.urlsafe_b64encode(text.encode()).decode()]  # fmt: skip
    native = native_of(compose_config([])[0], registry_for(()))
    values = [translate_source(source, native).values for source in sources]
    assert values == [values[0]] * 4 and values[0]["zero.stage"] == 2


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "\x00\x01"])
def test_what_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give a DeepSpeed config|repair it"):
        compose_config([f"deepspeed={write(tmp_path, text)}"])


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        compose_config(["deepspeed=nowhere/ds.json"])


# ------------------------------------------------------------------ key by key


def test_every_key_has_a_line() -> None:
    for name, text in FILES.values():
        if name.endswith(".json") and "CONFIG" not in text and "$" not in text:
            tree = hjson.parse(text)
            told = {x.path for x in translated_once(tree).lines}

            def leaves(node: Tree, prefix: str = "") -> list[str]:
                out = []
                for k, v in node.items():
                    out += leaves(v, f"{prefix}{k}.") if isinstance(v, dict) and v else [prefix + k]
                return out

            missing = [k for k in leaves(tree) if not any(k == t or k.startswith(t + ".") for t in told)]
            assert not missing, (name, missing)


def test_a_wrong_value_of_any_key_is_told_or_needs_nothing() -> None:
    for path in TABLE.rules:
        _any_value(path)


def _any_value(path: str) -> None:
    *parents, leaf = path.split(".")
    for value in (None, "auto", "$X", [], {"a": 1}, -1, 2.5, "nonsense"):
        tree: Tree = {}
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
        found = [
            x for x in translated_once(tree).lines if x.path == path or path.startswith(x.path + ".") or x.path.startswith(path)
        ]
        assert found, (path, value)


_NATIVE: list[Any] = []


def translated_once(tree: Tree) -> Translation:
    """`translated` without composing each time."""
    if not _NATIVE:
        _NATIVE.append(native_of(compose_config([])[0], registry_for(())))
    return translate(tree, "test", _NATIVE[0])


@pytest.mark.parametrize(
    ("value", "got"),
    [(5e8, 500000000), ("8", 8), (1e14, 100000000000000), ("1e5", 100000), (20000000000000000, 20000000000000000)],
)
def test_whole_numbers_in_any_notation(value: Any, got: int) -> None:
    assert translated_once({"steps_per_print": value}).values["train.log_every"] == got


@pytest.mark.parametrize("value", [0.5, "many", True, [], -3])
def test_what_is_no_count_is_refused(value: Any) -> None:
    found = line(translated_once({"steps_per_print": value}), "steps_per_print")
    assert found.verdict == REFUSED and "whole number" in found.why


@pytest.mark.parametrize(
    ("tree", "key", "says"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "zero_optimization"),
        ({"aio": {"block_sise": 1}}, "aio.block_sise", "aio.block_size"),
        ({"wandb": {"entity": "me"}}, "wandb.entity", "team"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", "nobody fills"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1, "max_live_parameters": 2}},
         "zero_optimization.stage3_max_live_parameters", "stands"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
         "zero_optimization.cpu_offload", "old name"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "bf16.enabled"),
        ({"amp": {"enabled": True}}, "amp.enabled", "apex"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param.device", "stage 3"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer.device", "stage 0"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param.nvme_path", "folder"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz_partition_size", "stage 3"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "zero_optimization.zero_quantized_gradients", "stage 3"),
        ({"gradient_clipping": -1.0}, "gradient_clipping", "at least 0"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "mean"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation", "partita.prepare"),
        ({"wall_clock_breakdown": "perhaps"}, "wall_clock_breakdown", "true or false"),
        ({"curriculum_learning": {"curriculum_type": "seqlen"}}, "curriculum_learning", "enabled"),
        ({"data_types": {"grad_accum_dtype": "bogus"}}, "data_types.grad_accum_dtype", "one of"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}, "zero_optimization": {"stage": 2}}, "optimizer.type", "stage 2"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type", "without optimizer.type"),
        ({"optimizer": {"type": "Adm"}}, "optimizer.type", "adam"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "optimizer.params.learning_rate", "no such key"),
        ({"scheduler": {"type": "WarmUp", "params": {}}}, "scheduler.type", "warmuplr"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}}, "scheduler.params.cycle_momentum", "false"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled", "leave it out"),
        ({"train_batch_size": 18, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}, "train_batch_size", "16 or 20"),
    ],
)  # fmt: skip
def test_what_deepspeed_ignores_or_refuses_late_is_refused_with_its_key(tree: Tree, key: str, says: str) -> None:
    found = refusal(tree)
    assert key in found, found
    assert says in found[key]


@pytest.mark.parametrize(
    ("tree", "values"),
    [
        ({"zero_optimization": True}, {"zero.stage": 1}),
        ({"zero_optimization": {"stage": "2", "cpu_offload": True}}, {"zero.stage": 2, "offload.optimizer": "host", "offload.gradients": "host"}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, {"zero.preset": "hsdp", "zero.shard_size": 4}),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, {"zero.preset": "hpz", "zero.shard_size": 8}),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
         {"offload.parameters": "file", "offload.path": "/x"}),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, {"offload.fraction": 0.3}),
        ({"bfloat16": {"enabled": "true"}}, {"precision.name": "bf16"}),
        ({"fp16": {"enabled": True}}, {"precision.name": "fp16", "precision.loss_scale.interval": 1000, "precision.loss_scale.hysteresis": 2,
                                       "precision.loss_scale.initial": 65536.0}),
        ({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 4}},
         {"precision.loss_scale.dynamic": False, "precision.loss_scale.initial": 128.0}),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"precision.name": "bf16"}),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}, {"optimizer.name": "adamw", "optimizer.betas": [0.9, 0.999],
                                                                    "optimizer.weight_decay": 0.0, "lr_schedule.name": "constant"}),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False}}}, {"optimizer.name": "adam"}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, {"optimizer.name": "sgd", "optimizer.momentum": 0.9}),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_min_lr": 1e-4, "warmup_num_steps": 7}}},
         {"lr_schedule.name": "warmup", "optimizer.lr": 1e-3, "lr_schedule.options.start": 0.1, "lr_schedule.warmup": 7}),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
         {"train.global_batch": 24, "train.micro_batch": 2, "parallel.microbatches": 3, "parallel.data": 4}),
        ({"train_micro_batch_size_per_gpu": 2}, {"train.global_batch": "auto", "train.micro_batch": 2, "parallel.microbatches": 1}),
        ({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 4}}, {"parallel.context": 2, "parallel.tensor": 4}),
        ({"activation_checkpointing": {"number_checkpoints": 4, "cpu_checkpointing": True}},
         {"recompute.policy": "full", "offload.activations": "host"}),
    ],
)  # fmt: skip
def test_what_is_taken_over(tree: Tree, values: dict[str, Any]) -> None:
    found = translated_once(tree)
    assert not found.of(REFUSED), found.text()
    assert {k: found.values.get(k) for k in values} == values


def test_a_section_that_is_off_needs_nothing() -> None:
    found = translated_once({"fp16": {"enabled": False, "hysteresis": 7}, "amp": {"enabled": False, "opt_level": "O1", "x": 1}})
    assert not found.of(REFUSED) and "precision.loss_scale.hysteresis" not in found.values
    assert line(found, "fp16.hysteresis").verdict == UNNEEDED


# ------------------------------------------------------------------ auto, the batch triple, and the command line


def test_every_auto_is_filled_by_a_rule_that_is_told(tmp_path: Path) -> None:
    for number in ("066", "077", "045"):
        found = translated_once(hjson.parse(FILES[number][1]))
        autos = [x for x in found.lines if x.value == "'auto'"]
        assert len(autos) >= 10 and {x.verdict for x in autos} == {FILLED}
        assert all(x.why for x in autos)


def test_auto_means_the_command_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
    )
    config, _ = compose_config([f"deepspeed={path}", "precision=bf16", "train.global_batch=6", "optimizer.lr=0.02"])
    assert (config.precision.name, config.train.global_batch, config.optimizer.lr) == ("bf16", 6, 0.02)
    config, _ = compose_config([f"deepspeed={path}"])
    assert config.precision.name == "fp32"


def test_a_single_key_of_the_command_line_overrules_the_file_and_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5})
    config, info = compose_config([f"deepspeed={path}", "zero.stage=3"])
    assert (config.zero.stage, config.train.grad_clip) == (3, 0.5)
    assert "overrules" in line(info.translation, "zero_optimization.stage").why  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["zero=stage3", "+strategy=zero3", "zero=stage0"])
def test_an_option_that_says_something_else_is_refused(option: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match=r"zero\.stage"):
        compose_config([f"deepspeed={path}", option])
    compose_config([f"deepspeed={path}", "zero=stage2"])


def test_an_option_goes_before_what_the_file_leaves_open(tmp_path: Path) -> None:
    path = write(tmp_path, {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    config, _ = compose_config([f"deepspeed={path}", "lr_schedule=cosine"])
    assert config.lr_schedule.name == "cosine"


def test_accumulation_of_the_command_line_joins_a_file_without(tmp_path: Path) -> None:
    """The file says nothing of accumulation, the command line 2: the plan has 2 passes, and the schedule counts updates."""
    from partita.plan.make import make_plan

    path = write(tmp_path, {"train_micro_batch_size_per_gpu": 2})
    config, _ = compose_config([f"deepspeed={path}", "parallel.microbatches=2", "launch.ranks=2"])
    schedule = make_plan(config, registry_for(())).plan.schedule
    assert (schedule.global_batch, schedule.micro_batch, schedule.micro_batches) == (8, 2, 2)


@pytest.mark.parametrize(
    ("batch", "more", "says"),
    [
        ((8, 2, 1), ["launch.ranks=4"], None),
        ((8, 2, 1), ["launch.ranks=4", "parallel.tensor=2"], "8 != 2 x 2 x 1 = 4 (data is 2 of 4 ranks"),
        ((18, 3, 1), ["launch.ranks=4"], "18 sequences can't be shared by data = 4 ranks"),
        ((18, 3, 1), [], None),
        ((8, 1.5, 1), [], "1.5 is not a whole number"),
    ],
)
def test_the_batch_triple(batch: tuple[Any, ...], more: list[str], says: str | None, tmp_path: Path) -> None:
    from partita.plan.make import make_plan

    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    path = write(tmp_path, dict(zip(names, batch, strict=True)))
    try:
        config, _ = compose_config([f"deepspeed={path}", *more])
        problems = "\n".join(map(str, make_plan(config, registry_for(())).problems))
    except ConfigError as error:
        problems = str(error)
    assert says in problems if says else not problems


def test_the_file_and_its_native_form_give_one_plan(tmp_path: Path) -> None:
    import yaml

    from partita.plan.make import make_plan

    path = write(tmp_path, {
        "train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.7,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-3, "total_num_steps": 20, "warmup_num_steps": 4}}})  # fmt: skip
    done = subprocess.run([sys.executable, str(ROOT / "scripts/translate.py"), path], capture_output=True, text=True, check=True)
    assert "taken over" in done.stderr

    def flat(node: Tree, prefix: str = "") -> list[str]:
        out = []
        for k, v in node.items():
            out += (
                flat(v, f"{prefix}{k}.")
                if isinstance(v, dict)
                else [f"{'+' if '.options.' in prefix + k else ''}{prefix}{k}={json.dumps(v)}"]
            )
        return out

    theirs, _ = compose_config([f"deepspeed={path}"])
    ours, _ = compose_config(flat(yaml.safe_load(done.stdout)))
    theirs.deepspeed = None
    theirs.run.dir = ours.run.dir = ""
    assert theirs == ours
    assert make_plan(theirs, registry_for(())).plan == make_plan(ours, registry_for(())).plan


# ------------------------------------------------------------------ Accelerate


def test_a_wrapper_fills_the_auto_of_the_file_that_it_names(tmp_path: Path) -> None:
    write(tmp_path, {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}, "inner.json")
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 2\n"
    path = write(tmp_path, text + "deepspeed_config:\n  deepspeed_config_file: inner.json\n  gradient_clipping: 0.3\n", "a.yaml")
    config, _ = compose_config([f"deepspeed={path}"])
    assert (config.precision.name, config.zero.stage, config.train.grad_clip, config.launch.ranks) == ("bf16", 3, 0.3, 2)
    path = write(tmp_path, text + "deepspeed_config:\n  deepspeed_config_file: inner.json\n  zero_stage: 2\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"zero_stage.*wrapped file says zero_optimization\.stage = 3"):
        compose_config([f"deepspeed={path}"])


# ------------------------------------------------------------------ schedules


@pytest.mark.parametrize("name", ["warmup", "warmup_decay", "warmup_cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("total", [None, 1, 5, 20])
def test_schedules_have_no_edge_without_an_answer(name: str, warmup: int, total: int | None) -> None:
    config = LrScheduleConfig(name=name, warmup=warmup, options={"total": total, "start": 0.1, "shape": "log"})
    factor = getattr(counted_schedules, f"make_{name}")(config, 20)
    rates = [factor(k) for k in range(1, 25)]
    assert all(math.isfinite(r) and 0.0 <= r <= 1.0 for r in rates)
    if warmup == 0 and name == "warmup":
        assert rates[0] == 1.0


def test_rates_are_those_of_deepspeeds_formula() -> None:
    """Rates of updates 1, 2, ... by hand: the scheduler steps after an update, and begins at -1."""
    linear = counted_schedules.make_warmup_decay(
        LrScheduleConfig(name="warmup_decay", warmup=4, options={"shape": "linear", "total": 10}), 99
    )
    assert [round(linear(k), 6) for k in range(1, 13)] == [
        0,
        0,
        0.25,
        0.5,
        0.75,
        1,
        0.833333,
        0.666667,
        0.5,
        0.333333,
        0.166667,
        0,
    ]
    log = counted_schedules.make_warmup(LrScheduleConfig(name="warmup", warmup=8), 99)
    assert [log(k) for k in (1, 2, 3, 5, 9, 10)] == pytest.approx([0, 0, 1 / 3, 2 / 3, 1, 1])
    cosine = counted_schedules.make_warmup_cosine(
        LrScheduleConfig(name="warmup_cosine", warmup=2, options={"end": 0.1, "total": 6}), 99
    )
    assert cosine(7) == pytest.approx(0.1) and cosine(5) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    cycle = counted_schedules.make_one_cycle(
        LrScheduleConfig(name="one_cycle", options={"low": 0.2, "first": 4, "second": 2}), 99
    )
    assert [round(cycle(k), 6) for k in range(1, 9)] == [0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.2, 0.2]
    test = counted_schedules.make_range_test(LrScheduleConfig(name="range_test", options={"interval": 2, "staircase": True}), 99)
    assert [test(k) for k in range(1, 6)] == [1, 1, 2, 2, 3]


# ------------------------------------------------------------------ mutations


def _fuzz() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_deepspeed", ROOT / "scripts/bench/fuzz_deepspeed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mutated_configs_have_clean_outcomes() -> None:
    outcomes = _fuzz().run(300, 20, [text for _, text in FILES.values()])
    assert outcomes["translated"] > 10 and outcomes["refused"] > 100


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6)  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(sorted([*TABLE.rules, *TABLE.sections, *TABLE.aliases, "optimizer.params.betas", "scheduler.params"])),
    value=JSON,
)
def test_any_value_under_any_key_has_a_clean_outcome(path: str, value: Any) -> None:
    tree: Tree = {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}, "fp16": {"enabled": True}}
    node = tree
    *parents, leaf = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            return
    node[leaf] = value
    found = translated_once(tree)
    assert all(x.why or x.key for x in found.lines)
    assert all(x.remedy for x in found.of(REFUSED))
    assert TAKEN in {x.verdict for x in found.lines} or found.of(REFUSED)
    root = root_type(registry_for(()))
    assert set(found.values) <= {k for k in found.values if hasattr(root(), k.split(".")[0])}
    assert apply(root(deepspeed=None), registry_for(()), []) is None
