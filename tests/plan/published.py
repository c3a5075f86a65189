"""Published trainings: what each step took, and why some were slower than a plan predicts. Shared with scripts/bench/auto.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """overrides: of the published layout. seconds: of a step. source: where. lacks: why a plan predicts less, by up to `off`; empty: it is met."""

    name: str
    overrides: tuple[str, ...]
    seconds: float
    source: str
    lacks: str = ""
    off: float = 0.15


def megatron(
    layers: int, width: int, heads: int, tensor: int, pipeline: int, ranks: int, batch: int, micro: int, *more: str
) -> tuple[str, ...]:
    """A GPT of Megatron's papers: 51,200 tokens, 2,048 positions, A100."""
    sizes = (f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", "model.vocab=51200", "data.sequence=2048")
    mesh = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", "cluster=dgx_a100", f"cluster.nodes={ranks // 8}")
    return (*sizes, *mesh, f"train.global_batch={batch}", f"train.micro_batch={micro}", "precision=bf16", "zero=stage0", *more)


def with_recompute(layers: int, width: int, batch: int, vocab: int = 51200, sequence: int = 2048) -> float:
    """FLOPs of a step, a second forward counted (Narayanan et al. 2021, equation 3)."""
    ends = vocab / (16 * layers * width)
    return 96 * batch * sequence * layers * width**2 * (1 + sequence / (6 * width) + ends)


def _megatron(name: str, sizes: tuple[int, ...], reached: float, table: int, **more: object) -> Published:
    """Of Narayanan et al. 2021. sizes: arguments of `megatron`. reached: FLOP/s of a device."""
    layers, width, _, _, _, ranks, batch, _ = sizes
    seconds = with_recompute(layers, width, batch) / (ranks * reached)
    source = f"Narayanan et al. 2021, table {table}: {reached / 1e12:.0f} TFLOP/s"
    return Published(name, megatron(*sizes, "recompute=full"), seconds, source, **more)  # type: ignore[arg-type]


SCORES = "attention that writes its [T, T] scores (Partita's never does), and the rates of narrow matrices"
STEPS = [
    _megatron("GPT 145B, 1536 A100", (80, 12288, 96, 8, 8, 1536, 2304, 2), 148e12, 1),
    _megatron("GPT 310B, 1920 A100", (96, 16384, 128, 8, 16, 1920, 2160, 1), 155e12, 1),
    _megatron("GPT 1T, 3072 A100", (128, 25600, 160, 8, 64, 3072, 3072, 1), 163e12, 1),
    _megatron("GPT-3 175B, 1536 A100", (96, 12288, 96, 8, 12, 1536, 1536, 1), 141e12, 2),
    Published(
        "GPT-3 175B, 1024 A100",
        ("+experiment=gpt3_175b",),
        with_recompute(96, 12288, 1536) / (1024 * 140e12),
        "Narayanan et al. 2021, section 5.1: 140 TFLOP/s",
    ),
    Published(
        "GPT 175B, 64 A100, attention not kept",
        megatron(96, 12288, 96, 8, 8, 64, 64, 1),
        13.75,
        "Korthikanti et al. 2022, table 5",
    ),
    Published(
        "BLOOM 176B, 384 A100",
        ("+experiment=bloom_176b",),
        with_recompute(70, 14336, 2048, 250880) / (384 * 156e12),
        "Scao et al. 2022, section 3.4: 156 TFLOP/s",
    ),
    Published("MT-NLG 530B, 2240 A100", ("+experiment=mtnlg_530b",), 60.1, "Smith et al. 2022, section 2.3"),
    _megatron("GPT 7.5B, 128 A100", (36, 4096, 32, 4, 1, 128, 512, 16), 142e12, 1),
    _megatron("GPT 1.7B, 32 A100", (24, 2304, 24, 1, 1, 32, 512, 16), 137e12, 1, lacks=SCORES, off=0.40),
    _megatron("GPT 18B, 256 A100", (40, 6144, 48, 8, 1, 256, 1024, 16), 135e12, 1),
    *(
        Published(
            f"ZeRO-3 alone, 175B, {ranks} A100",
            (*megatron(96, 12288, 96, 1, 1, ranks, 1536, micro, "recompute=full"), "zero=stage3"),
            with_recompute(96, 12288, 1536) / (ranks * reached),
            f"Narayanan et al. 2021, table 2: {reached / 1e12:.0f} TFLOP/s",
            "thousands of small messages of a gather over all ranks, and waiting for the slowest of them",
            off,
        )
        for ranks, micro, reached, off in ((384, 4, 144e12, 0.50), (1536, 1, 44e12, 4.0))
    ),
]
