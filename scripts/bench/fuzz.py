"""Damaged and made-up files for every reader: only clean errors, no hang, no code run.

python scripts/bench/fuzz.py --seconds 600            # exit status 1 at the first uncaught error of each kind
python scripts/bench/fuzz.py --seconds 30 checkpoint  # checkpoint, memory, foreign, tokens, config, metrics

Bytes are flipped, cut, repeated; numbers and texts of sealed documents are changed and sealed again, so that the reader behind the
checksum is reached. A PartitaError, or a result, is right. Anything else is a defect: it is printed with the seed that makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from partita.errors import PartitaError

LIMIT = 10  # seconds that one file may take
ODD: list[Any] = [
    0,
    -1,
    1,
    2**31,
    2**63,
    2**70,
    1e308,
    float("nan"),
    "",
    "x",
    "../../x",
    "\0",
    None,
    [],
    {},
    True,
    [1],
    {"a": 1},
    [[]],
    "ü" * 50,
]


# ------------------------------------------------------------------ changes


def scramble(data: bytes, rng: random.Random) -> bytes:
    """A few changes of bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        kind, at = rng.randrange(5), rng.randrange(len(out) + 1)
        if kind == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        elif kind == 3:
            del out[at : at + rng.choice((1, 8, 64))]
        else:
            out[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, out[: rng.randrange(40)]))
    return bytes(out)


def twist(value: Any, rng: random.Random) -> Any:
    """One value, somewhere inside a JSON document, becomes another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: twist(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        i = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:i] + value[i + 1 :]
        return [*value[:i], twist(value[i], rng), *value[i + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 8, -(2**40), 2**40))
    return rng.choice(ODD)


# ------------------------------------------------------------------ readers


def damage(path: Path, rng: random.Random, sealed: bool) -> None:
    """Change a file. sealed: a document whose checksum fits what has become of it, so that its reader gets to the contents."""
    from partita.train import storage

    if not sealed:
        path.write_bytes(scramble(path.read_bytes(), rng))
        return
    content = storage.read_sealed(path)
    del content["sha256"]
    twisted = twist(content, rng)
    storage.write_sealed(path, twisted if isinstance(twisted, dict) else content)


class Checkpoints:
    """Our own checkpoints."""

    def __init__(self, folder: Path) -> None:
        from partita.plan.plan import Layout
        from partita.runtime.mesh import Mesh
        from partita.state.slices import StateSlice
        from partita.train.checkpoint import Checkpointer

        self.folder, self.whole, self.slice = folder, folder.with_name("whole"), StateSlice
        made = Checkpointer(self.whole, Mesh(Layout(), 0, torch.device("cpu")), asynchronous=False, life="fuzz")
        state = {"model.a": torch.arange(12.0), "model.b": torch.ones(3), "optimizer.a.exp_avg": torch.zeros(12)}
        slices = [StateSlice(k, tuple(t.shape), t.dtype, 0, t.numel(), t) for k, t in state.items()]
        made.save(3, slices, {"step": 3, "bytes": b"abc", "t": (1, 2)}, {"rng": {"a": (1,)}}, score=0.5)

    def __call__(self, rng: random.Random) -> None:
        from partita.train import checkpoint
        from partita.train.dcp import PartitaReader

        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        inside = self.folder / "step-00000003"
        path = rng.choice([*inside.iterdir(), self.folder / "latest"])
        damage(path, rng, sealed=path.suffix == ".json" and rng.random() < 0.7)
        a = torch.zeros(12, dtype=rng.choice((torch.float32, torch.bfloat16, torch.int64)))
        readers: list[Callable[[], Any]] = [
            lambda: checkpoint.list_checkpoints(self.folder),
            lambda: checkpoint.inspect(self.folder),
            lambda: checkpoint.read_weights(self.folder),
            lambda: checkpoint.verify(inside),
            lambda: checkpoint.load_slices(self.folder, [self.slice("model.a", (12,), a.dtype, 2, 9, a[2:9])], partial=rng.random() < 0.5),
            lambda: PartitaReader(inside).read_metadata(),
        ]  # fmt: skip
        rng.choice(readers)()


class Memory:
    """Snapshots in memory, and what a neighbour sends."""

    def __init__(self, folder: Path) -> None:
        from partita.state.slices import StateSlice

        self.folder, self.whole, self.slice = folder, folder.with_name("remembered"), StateSlice
        made = self._open(self.whole)
        for step in (1, 2):
            state = torch.arange(12.0) + step
            made.save(step, [StateSlice("model.a", (12,), state.dtype, 0, 12, state)], {"step": step}, {"rng": {"a": (1,)}})
        made._settle()

    def _open(self, folder: Path) -> Any:
        from partita.plan.plan import Layout
        from partita.runtime.mesh import Mesh
        from partita.train.memory import MemorySnapshots

        return MemorySnapshots(folder, Mesh(Layout(), 0, torch.device("cpu")))

    def __call__(self, rng: random.Random) -> None:
        from partita.train.loading import load_slices

        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder, symlinks=True)
        inside = next(self.folder.glob("step-*"))
        for link in inside.glob("*.bin"):
            kept = self.folder / Path(os.readlink(link)).name
            link.unlink()
            link.symlink_to(kept)
        path = rng.choice([*inside.iterdir(), *self.folder.glob("*.memory")])
        damage(path, rng, sealed=path.suffix in (".json", ".part") and rng.random() < 0.8)
        found = self._open(self.folder).restore(lambda _index: {0}, rng.randrange(4))
        if found is not None:
            load_slices(found, [self.slice("model.a", (12,), torch.float32, 2, 9, torch.zeros(7))])


class Foreign:
    """Files of torch.save, DeepSpeed folders, Hugging Face folders."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import save_file

        self.folder, self.whole = folder, folder.with_name("foreign")
        deep, face = self.whole / "deepspeed", self.whole / "face"
        deep.mkdir(parents=True)
        face.mkdir()
        args = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 4, "vocab_size": 5}
        names = ("transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight")
        weights = {n: torch.ones(5, 4) for n in names} | {"transformer.h.0.ln_1.weight": torch.ones(4)}
        torch.save({"model": weights, "model_args": args, "iter_num": 3}, self.whole / "ckpt.pt")
        for rank in range(2):
            state = {
                "zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": [torch.ones(6)],
                "base_optimizer_state": {"state": {0: {"step": 3, "exp_avg": torch.ones(6)}}, "param_groups": []},
            }  # fmt: skip
            torch.save({"optimizer_state_dict": state}, deep / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        head = {"module": {"w": torch.ones(3, 4)}, "param_shapes": [{"w": torch.Size([3, 4])}], "buffer_names": []}
        torch.save(head, deep / "mp_rank_00_model_states.pt")
        save_file(weights, face / "model.safetensors")
        config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 1, "vocab_size": 5, "n_positions": 4}
        (face / "config.json").write_text(json.dumps(config))

    def __call__(self, rng: random.Random) -> None:
        from partita.train.foreign.convert import convert

        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        path = rng.choice([p for p in self.folder.rglob("*") if p.is_file()])
        if path.suffix == ".json" and rng.random() < 0.7:
            path.write_text(json.dumps(twist(json.loads(path.read_text()), rng)))
        elif path.suffix == ".pt" and rng.random() < 0.5:
            torch.save(_twisted(torch.load(path, weights_only=True), rng), path)
        elif path.suffix == ".pt" and rng.random() < 0.2:
            path.write_bytes(pickle.dumps({"model": rng.choice(ODD)}))
        else:
            path.write_bytes(scramble(path.read_bytes(), rng))
        source = path if path.name == "ckpt.pt" else path.parent
        convert(source, self.folder / "out", rng.choice(("auto", "as_is", "hf", "gpt", "nanogpt", "llama", "bert")))


def _twisted(value: Any, rng: random.Random) -> Any:
    """Like `twist`, of what torch.save holds."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: _twisted(value[key], rng)}
    if isinstance(value, list) and value:
        return [_twisted(value[0], rng), *value[1:]]
    if isinstance(value, torch.Tensor) and rng.random() < 0.5:
        return torch.ones(rng.randrange(20)).to(rng.choice((torch.float32, torch.int64, torch.bool)))
    return rng.choice(ODD)


class TokenFiles:
    """Megatron pairs and raw files."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        from partita.data.formats import write_megatron

        self.folder = folder
        folder.mkdir()
        write_megatron(folder / "whole", [np.arange(n) for n in (5, 0, 9, 3)])

    def __call__(self, rng: random.Random) -> None:
        from partita.data.formats import read_megatron, read_raw

        for suffix in (".bin", ".idx"):
            data = (self.folder / f"whole{suffix}").read_bytes()
            (self.folder / f"x{suffix}").write_bytes(scramble(data, rng) if rng.random() < 0.6 else data)
        found = read_megatron(self.folder / "x.idx") if rng.random() < 0.8 else read_raw(self.folder / "x.bin", "uint16")
        assert found.starts is None or (found.starts < max(1, len(found.tokens))).all(), "a document begins behind the end"
        found.tokens[:3].tolist()


class Configs:
    """Overrides as somebody types them, from real keys and from noise."""

    def __init__(self, folder: Path) -> None:
        from partita.config.compose import compose_config

        del folder
        compose_config([])  # the first one imports all plug-ins
        self.keys = [
            "train.steps", "optimizer.lr", "model.width", "parallel.data", "precision", "+strategy", "zero.stage", "data", "model.options",
            "optimizer.betas", "optimizer.groups", "launch.ranks", "run.dir", "train.resume", "lr_schedule.warmup", "trian.steps", "+x.y", "~data",
            "hydra.run.dir", "model", "++train", "cluster.nodes",
        ]  # fmt: skip
        self.values = [
            "1", "-1", "0", "1e-3", "nan", "inf", "null", "[1,2]", "{a:1}", "x", "'", '"', "${seed}", "${train}", "${oc.env:NO}", "1,2", "zero3",
            "[zero3,ddp]", "", "\\", "..", "a=b", "ü", "9" * 40, "[", "}", "true", "auto", "0x10", "${", "@", "data@x", "!!python/object:os.system",
        ]  # fmt: skip

    def __call__(self, rng: random.Random) -> None:
        from partita.config.command import parse_command
        from partita.config.compose import compose_config

        words = [f"{rng.choice(self.keys)}={rng.choice(self.values)}" for _ in range(rng.choice((1, 1, 2, 4)))]
        if rng.random() < 0.3:
            words[0] = scramble(words[0].encode(), rng).decode(errors="replace").replace("\0", "")
        if rng.random() < 0.2:
            parse_command([*words, rng.choice(("-m", "--cfg", "--resolve", "--nope", "-x", "--help"))])
        else:
            compose_config(words)


class Metrics:
    """metrics.jsonl of a run that goes on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.with_name("metrics.jsonl")

    def __call__(self, rng: random.Random) -> None:
        from partita.train.metrics import MetricsFile

        lines = [json.dumps({"step": i, "loss": 1.0 / i}) for i in range(1, 9)]
        if rng.random() < 0.5:
            i = rng.randrange(8)
            lines[i] = json.dumps(twist(json.loads(lines[i]), rng))
        data = ("\n".join(lines) + "\n").encode()
        self.path.write_bytes(scramble(data, rng) if rng.random() < 0.6 else data)
        file = MetricsFile(self.path, enabled=True)
        file.cut(rng.randrange(10))
        file.write({"step": 10, "loss": 0.0})
        file.close()


READERS: dict[str, Callable[[Path], Callable[[random.Random], None]]] = {
    "checkpoint": Checkpoints, "memory": Memory, "foreign": Foreign, "tokens": TokenFiles, "config": Configs, "metrics": Metrics,
}  # fmt: skip


# ------------------------------------------------------------------ main


def alarm(_signum: int, _frame: Any) -> None:
    """A case that takes too long."""
    raise TimeoutError(f"no end within {LIMIT} s")


def one(reader: Callable[[random.Random], None], seed: int) -> tuple[str, str]:
    """(kind, text) of how one case ended: `read`, `refused`, or the place of an error that nobody caught."""
    signal.alarm(LIMIT)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader(random.Random(seed))
    except PartitaError as error:
        return ("refused", "") if str(error).strip() else ("an error without a text", "")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        places = traceback.extract_tb(error.__traceback__)
        inner = next((p for p in reversed(places) if "partita" in p.filename), places[-1])
        return f"{type(error).__name__} at {Path(inner.filename).name}:{inner.lineno}", traceback.format_exc()
    finally:
        signal.alarm(0)
    return "read", ""


def main() -> int:
    """Fuzz; 1 where something but a clean error came up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("readers", nargs="*", default=[], help=f"of {', '.join(READERS)}; default: all")
    args = parser.parse_args()
    unknown = [r for r in args.readers if r not in READERS]
    if unknown:
        parser.error(f"no reader {unknown[0]!r}; there are {', '.join(READERS)}")
    signal.signal(signal.SIGALRM, alarm)
    names, bad = args.readers or list(READERS), 0
    with tempfile.TemporaryDirectory(prefix="partita_fuzz_") as scratch:
        os.chdir(scratch)
        for name in names:
            (Path(scratch) / name).mkdir()
            reader, counts, shown, seed = READERS[name](Path(scratch) / name / "x"), Counter[str](), set(), args.seed
            end = time.monotonic() + args.seconds / len(names)
            while time.monotonic() < end:
                kind, text = one(reader, seed)
                counts[kind] += 1
                if kind not in ("read", "refused") and kind not in shown:
                    shown.add(kind)
                    print(f"{name}, seed {seed}: {kind}\n{text}", file=sys.stderr)
                seed += 1
            bad += len(shown)
            print(
                f"{name:10s} {sum(counts.values()):7d} cases  " + "  ".join(f"{k}: {n}" for k, n in sorted(counts.items())),
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
