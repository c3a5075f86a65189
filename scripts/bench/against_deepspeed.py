"""The same DeepSpeed files in DeepSpeed and in Partita: do both give the same losses?

    make bench-peers                                     # installs DeepSpeed
    python scripts/bench/against_deepspeed.py [--steps 20] [--python OTHER_PYTHON] [--case stage2-fp32]

Two gloo ranks for each of the two, one start for all cases: stages 0 to 3, float32 and bfloat16, with and without the optimizer on the
host, accumulation over two micro-batches, clipping. A small GPT with equal weights reads the same random tokens. The largest relative
difference of the losses must be below 1e-4 (bfloat16: 1e-2). Exit status 1 where one is above.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT = 900  # seconds of one engine's runs
RANKS, MICRO, ACCUMULATION, VOCAB, LENGTH = 2, 2, 2, 96, 24
SIZES = ["model.layers=2", "model.width=32", "model.heads=4", f"data.sequence={LENGTH}", "model.init_std=0.1"]
BOUNDS = {"fp32": 1e-4, "bf16": 1e-2}


def cases() -> dict[str, dict[str, Any]]:
    """Name -> DeepSpeed config."""
    found = {}
    for stage in range(4):
        for precision in BOUNDS:
            for offload in (
                (False, True) if stage else (False,)
            ):  # stage 0 has nothing to offload: DeepSpeed ignores it, Partita refuses
                zero: dict[str, Any] = {"stage": stage}
                if offload:
                    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
                found[f"stage{stage}-{precision}{'-offload' * offload}"] = {
                    "train_micro_batch_size_per_gpu": MICRO,
                    "gradient_accumulation_steps": ACCUMULATION,
                    "gradient_clipping": 0.5,
                    "zero_optimization": zero,
                    "bf16": {"enabled": precision == "bf16"},
                    "optimizer": {
                        "type": "AdamW",
                        "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
                    },
                    "zero_force_ds_cpu_optimizer": False,
                    "zero_allow_untested_optimizer": True,
                }
    return found


# ------------------------------------------------------------------ on the ranks


def model() -> Any:
    """A GPT with weights that depend on names only."""
    import torch

    from partita.config.compose import compose_config
    from partita.models.gpt import make_gpt
    from partita.models.init import initialize

    config, _ = compose_config(SIZES)
    with torch.device("meta"):
        made = make_gpt(config, VOCAB)
    return initialize(made, 7)


def loss_of(net: Any, ids: Any) -> Any:
    """Mean over the tokens of a micro-batch."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(net(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def samples(step: int, rank: int) -> list[Any]:
    """A rank's micro-batches: counting sequences, which can be learnt."""
    import torch

    draw = torch.Generator().manual_seed(1000 * step + rank)
    start, stride = (torch.randint(1, n, (MICRO * ACCUMULATION, 1), generator=draw) for n in (VOCAB, 5))
    return list(((start + stride * torch.arange(LENGTH + 1)) % VOCAB).chunk(ACCUMULATION))


def ours(file: Path, steps: int, rank: int) -> list[float]:
    """Losses of Partita."""
    import partita

    session = partita.prepare(model(), [f"deepspeed={file}"])
    return [session.step(samples(step, rank), loss_of).loss for step in range(steps)]


def theirs(file: Path, steps: int, rank: int) -> list[float]:
    """Losses of DeepSpeed, averaged over ranks."""
    import deepspeed
    import torch
    import torch.distributed as dist

    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=str(file))
    found = []
    for step in range(steps):
        total = torch.zeros(())
        for ids in samples(step, rank):
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / ACCUMULATION
        dist.all_reduce(total)
        found.append(total.item() / RANKS)
    engine.destroy()
    return found


def rank_main(engine: str, folder: Path, steps: int, names: list[str]) -> None:
    """All cases on one rank of one engine; rank 0 writes the losses, or what went wrong."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if engine == "theirs":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    run = {"ours": ours, "theirs": theirs}[engine]
    found: dict[str, list[float] | str] = {}
    for name in names:
        try:
            found[name] = run(folder / f"{name}.json", steps, rank)
        except Exception as error:  # the table says so; other cases go on
            found[name] = f"{type(error).__name__}: {error}"
            if engine == "ours":
                raise
    if rank == 0:
        (folder / f"{engine}.result").write_text(json.dumps(found))


# ------------------------------------------------------------------ starting and comparing


def start(python: str, engine: str, folder: Path, steps: int, names: list[str]) -> dict[str, Any]:
    """Losses of all cases with one engine. Exits where its ranks fail."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, __file__, "--rank-of", engine, "--folder", str(folder), "--steps", str(steps), "--case", *names]
    shared = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
                           "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(RANKS)}  # fmt: skip
    # not the shared folder: a lock that a killed compilation left there is waited for without end
    shared.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    logs = [folder / f"{engine}{rank}.log" for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            command, env=shared | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=log.open("w"), stderr=subprocess.STDOUT
        )
        for r, log in enumerate(logs)
    ]
    try:
        failed = any(rank.wait(TIMEOUT) for rank in ranks)
    except subprocess.TimeoutExpired:
        failed = True
    if failed:
        for rank in ranks:
            rank.kill()
        sys.exit(f"{engine} failed:\n" + "\n".join(log.read_text()[-3000:] for log in logs))
    found: dict[str, Any] = json.loads((folder / f"{engine}.result").read_text())
    return found


def main() -> int:
    """Compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has DeepSpeed; default: this one")
    parser.add_argument("--case", nargs="*", help="only these")
    parser.add_argument("--rank-of", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args.rank_of, args.folder, args.steps, args.case)
        return 0
    with tempfile.TemporaryDirectory(prefix="partita_against_") as name:
        folder, chosen = Path(name), {n: c for n, c in cases().items() if not args.case or n in args.case}
        for case, config in chosen.items():
            (folder / f"{case}.json").write_text(json.dumps(config, indent=2))
        found = {
            engine: start(python, engine, folder, args.steps, list(chosen))
            for engine, python in (("ours", sys.executable), ("theirs", args.python))
        }
    return show(found, args.steps)


def show(found: dict[str, dict[str, Any]], steps: int) -> int:
    """Print the table; 1 where a difference is too large."""
    wrong = 0
    print(f"{'case':24} {'first':>9} {'last':>9} {'difference':>11}   ({steps} losses, DeepSpeed beside Partita)")
    for case, mine in found["ours"].items():
        peer = found["theirs"][case]
        if isinstance(peer, str):
            print(f"{case:24} DeepSpeed fails: {peer.splitlines()[0][:90]}")
            continue
        worst = max(abs(a - b) / abs(b) for a, b in zip(mine, peer, strict=True))
        bound = BOUNDS[case.split("-")[1]]
        wrong += worst > bound
        print(f"{case:24} {mine[0]:9.5f} {mine[-1]:9.5f} {worst:11.1e}   {'' if worst <= bound else f'above {bound}'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
