"""Pipeline schedules as formulas: how long stages wait, how many micro-batches are on their way."""

from __future__ import annotations


def chunks_of(name: str, stages: int, ranks: int) -> int:
    """Stages that one rank has. stages: cuts + 1."""
    return max(1, stages // ranks) if name in ("interleaved", "interleaved_zb", "zbv", "dualpipev") else 1


def bubble(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Waiting, as a share of the time that a rank works.

    gpipe, 1f1b: (p - 1) / m (Narayanan et al. 2021, section 2.2.1); interleaved: the same / v (section 2.2.2). Those that split backward,
    with forward and both halves equally long: a third of interleaved, (p - 1) (F + B - W) of a stage (Qi et al. 2023, table 1); zbv and
    dualpipev have v = 2 and wait no longer than that while they fill and drain.
    """
    if ranks == 1:
        return 0.0
    whole = (ranks - 1) / micro_batches
    match name:
        case "interleaved":
            return whole / max(1, chunks)
        case "interleaved_zb" | "zbv" | "dualpipev":
            return whole / max(1, chunks) / 3
    return whole


def stretch(waiting: float, ranks: int, cores: float | None) -> float:
    """Time of a step over the time that a rank works, bubble (`waiting`) included.

    cores: stages that can work at once where ranks share the cores of a machine, or None where each has a device of its own. A
    stage that waits leaves its core to the others, so a pipeline on fewer cores than stages waits less.
    """
    if cores is None or ranks <= cores or not waiting:
        return 1 + waiting
    # while it fills and drains k of p stages work: they take max(1, k / cores), all of them p / cores
    full = ranks / cores
    ends = 2 * sum(max(1.0, k / cores) for k in range(1, ranks)) / full
    return 1 + max(0.0, waiting / (ranks - 1) * (ends - (ranks - 1)))


def in_flight(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Micro-batches whose activations the fullest rank keeps, in units of all that it keeps for one.

    gpipe: all; 1f1b: p; interleaved: p (1 + (p - 1) / (p v)) (Korthikanti et al. 2022, section 4.2.3); zbv: as 1f1b (Qi et al. 2023);
    dualpipev: p + 1/2 (2 p + 1 half stages, DeepSeek-AI 2024, table 2).
    """
    if ranks == 1:
        return 1.0
    match name:
        case "gpipe":
            return float(micro_batches)
        case "interleaved":
            return min(float(micro_batches), ranks * (1 + (ranks - 1) / (ranks * max(1, chunks))))
        case "dualpipev":
            return min(float(micro_batches), ranks + 0.5)
    return float(min(micro_batches, ranks))
