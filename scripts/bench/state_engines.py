"""The engines that `state.py` compares. Each trains the same model from the same weights; `import` comes before `build`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SIZES = {
    "2m": ["model.layers=4", "model.width=192", "model.heads=6", "model.vocab=272", "model.tie_embeddings=false"],
    "20m": ["model.layers=6", "model.width=512", "model.heads=8", "model.vocab=272", "model.tie_embeddings=false"],
    "120m": ["model.layers=12", "model.width=768", "model.heads=12", "model.vocab=50304"],
}
RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and labels, int64 [sequences, tokens]


class Engine(ABC):
    """What `state.py` runs. settings: its command line. config: Partita's config of the model and of the run."""

    def __init__(self, settings: argparse.Namespace, config: Any) -> None:
        self.settings, self.config = settings, config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.bf16 = settings.dtype == "bf16"
        self._text = _text()

    @abstractmethod
    def build(self) -> None:
        """Make model and optimizer."""

    @abstractmethod
    def train(self, batches: list[Batch]) -> float:
        """One update on this rank's micro-batches; this rank's mean loss, or that of all ranks."""

    def update(self, step: int) -> float:
        """Update number `step`."""
        return self.train([self._batch(step, i) for i in range(self.settings.accumulation)])

    def _batch(self, step: int, micro: int) -> Batch:
        s = self.settings
        g = torch.Generator().manual_seed(((step * s.accumulation + micro) * self.world + self.rank) * 7919 + 17)
        starts = torch.randint(len(self._text) - s.sequence - 1, (s.micro,), generator=g).tolist()
        tokens = torch.stack([self._text[i : i + s.sequence + 1] for i in starts]).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _text() -> torch.Tensor:
    """Bytes of the standard library's own source, up to 8 MiB."""
    folder = Path(argparse.__file__).parent
    found = bytearray()
    for file in sorted(folder.glob("*.py")):
        found += file.read_bytes()
    return torch.frombuffer(found[: 8 * 2**20], dtype=torch.uint8)


# ------------------------------------------------------------------ Partita


class Partita(Engine):
    """A run as `scripts/train.py` makes it, stepped by its own loop; data and console are left out."""

    def __init__(self, settings: argparse.Namespace, config: Any, planned: Any, job: Any) -> None:
        super().__init__(settings, config)
        from partita.config.plain import to_plain
        from partita.runtime.spec import RunSpec
        from partita.train import loop

        self._loop = loop
        self._spec = RunSpec(to_plain(config), planned.plan, job, self.world, tuple(config.plugins.block))

    def build(self) -> None:
        """See `Engine`."""
        from partita.train.run import open_run

        self.run = open_run(self._spec)
        self._clock = self._loop.StepClock()

    def train(self, batches: list[Batch]) -> float:
        """See `Engine`."""
        ready = [{"input_ids": x, "labels": y} for x, y in batches]
        self.run.step += 1
        metrics, _ = self._loop.one_update(self.run, self.run.step, ready, self._clock)
        return float(metrics["loss"])


# ------------------------------------------------------------------ peers


class Peer(Engine):
    """A plain torch loop over the same model: forward, mean loss, backward, clipping, fused AdamW."""

    def model(self) -> nn.Module:
        """The model with its seeded weights, in float32."""
        from partita.plugin.registry import Registry
        from partita.train.run import weight_source

        registry = Registry.load(())
        model: nn.Module = registry.provide("model", self.config.model.name)(self.config, self.config.model.vocab)
        source = weight_source(model, self.config.seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(source(name, tuple(p.shape)))
        return model

    def build(self) -> None:
        """See `Engine`."""
        self.module = self.wrap(self.model())
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The model under the peer's parallelism."""

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward."""
        return contextlib.nullcontext()

    def sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; `last` of the update."""
        return contextlib.nullcontext()

    def train(self, batches: list[Batch]) -> float:
        """See `Engine`."""
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            with self.sync(i == len(batches) - 1):
                with self.cast():
                    loss = mean_loss(self.module, batch)
                (loss / len(batches)).backward()
            total += loss.detach()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total / len(batches))


def mean_loss(module: Any, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of a micro-batch."""
    logits = module(batch[0])
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), batch[1].reshape(-1))


class Ddp(Peer):
    """DistributedDataParallel; bf16 by autocast over float32 weights."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """See `Peer`."""
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        """See `Peer`."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)

    def sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """See `Peer`."""
        module: Any = self.module
        return contextlib.nullcontext() if last else module.no_sync()


class Fsdp2(Peer):
    """fully_shard on each block and on the rest; bf16 by its MixedPrecisionPolicy with float32 reduction."""

    reshard = True

    def __init__(self, settings: argparse.Namespace, config: Any) -> None:
        super().__init__(settings, config)
        import torch.distributed.fsdp  # noqa: F401

    def wrap(self, model: nn.Module) -> nn.Module:
        """See `Peer`."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bf16 else MixedPrecisionPolicy()
        module: Any = model
        for block in module.blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=self.reshard)
        fully_shard(module, mp_policy=policy, reshard_after_forward=self.reshard)
        return model


class Fsdp2Whole(Fsdp2):
    """FSDP2 that keeps weights whole between forward and backward."""

    reshard = False


class DeepSpeed(Engine):
    """A DeepSpeed engine with its CPU build of torch's AdamW."""

    def __init__(self, settings: argparse.Namespace, config: Any, stage: int) -> None:
        super().__init__(settings, config)
        import deepspeed

        self._deepspeed, self._stage = deepspeed, stage

    def build(self) -> None:
        """See `Engine`."""
        s = self.settings
        adam = {"lr": RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "torch_adam": True, "adam_w_mode": True}
        options: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": s.micro,
            "gradient_accumulation_steps": s.accumulation,
            "gradient_clipping": s.clip,
            "zero_optimization": {"stage": self._stage},
            "bf16": {"enabled": self.bf16},
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_allow_untested_optimizer": True,
        }
        model = Ddp.model(self)  # type: ignore[arg-type]
        self.engine, *_ = self._deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)

    def train(self, batches: list[Batch]) -> float:
        """See `Engine`."""
        total = torch.zeros(())
        for batch in batches:
            loss = mean_loss(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().float()
        return float(total / len(batches))


PEERS: dict[str, Any] = {"ddp": Ddp, "fsdp2": Fsdp2, "fsdp2_whole": Fsdp2Whole}


def make_engine(name: str, settings: argparse.Namespace) -> Engine:
    """ddp, fsdp2, fsdp2_whole, deepspeed0 to 3, partita0 to 3 (or partita:PRESET), or FILE.py:CLASS. Exits for any other name."""
    from partita.config.compose import compose_config

    config, job = compose_config(overrides(name, settings))
    if name.startswith("partita"):
        from partita.plan.make import make_plan
        from partita.plugin.registry import Registry

        planned = make_plan(config, Registry.load(tuple(config.plugins.block)))
        planned.raise_problems()
        return Partita(settings, config, planned, job)
    if name.startswith("deepspeed"):
        return DeepSpeed(settings, config, int(name.removeprefix("deepspeed")))
    if name in PEERS:
        return PEERS[name](settings, config)
    file, _, cls = name.partition(":")
    if not cls or not Path(file).exists():
        sys.exit(f"there is no engine {name!r}; there are {', '.join(PEERS)}, deepspeed0 to 3, partita0 to 3, FILE.py:CLASS")
    spec = importlib.util.spec_from_file_location("bench_engine", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine: Engine = getattr(module, cls)(settings, config)
    return engine


def overrides(name: str, settings: argparse.Namespace) -> list[str]:
    """Overrides of Partita's config that make the run which all engines make."""
    if settings.size not in SIZES:
        sys.exit(f"--size: there is no {settings.size!r}; there are {', '.join(SIZES)}")
    batch = settings.micro * settings.accumulation * settings.ranks
    common = [
        *SIZES[settings.size], f"data.sequence={settings.sequence}", f"train.global_batch={batch}",
        f"train.micro_batch={settings.micro}", f"train.grad_clip={settings.clip}", f"optimizer.lr={RATE}",
        f"optimizer.weight_decay={DECAY}", "optimizer.decay_1d=true", "lr_schedule=constant", "lr_schedule.warmup=0",
        f"launch.ranks={settings.ranks}", f"precision={settings.dtype}", "train.resume=never",
        f"run.dir={tempfile.mkdtemp(prefix='partita_bench_run_')}",
    ]  # fmt: skip
    if not name.startswith("partita"):
        return common
    what = name.removeprefix("partita").lstrip(":")
    return [*common, f"zero=stage{what}" if what in ("0", "1", "2", "3") else f"zero={what}", *settings.override]
