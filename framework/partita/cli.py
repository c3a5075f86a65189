"""Commands: `partita train | plan | plugins | translate | export | convert`, and what scripts/ call. Imports stay light until a job runs."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from partita.config.app import report
from partita.config.command import joined_rank
from partita.config.compose import hydra_main, registry_for
from partita.config.job import JobInfo
from partita.config.plain import to_plain
from partita.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, PartitaError, did_you_mean
from partita.plugin.listing import render
from partita.plugin.registry import Registry, block_from_argv

USAGE = """\
usage: partita COMMAND [ARGUMENTS]

  train    train:            partita train +strategy=zero3 model=llama train.steps=1000
  plan     show the plan:    partita plan +strategy=zero3 cluster=dgx_h100 cluster.nodes=4
  calibrate  measure this machine for plans: partita calibrate launch.ranks=4
  plugins  list plug-ins, what each provides, and where it comes from
  translate print a DeepSpeed config as ours:  partita translate ds_config.json [KEY=VALUE ...]
  export   write a run's weights for others:  partita export RUN_FOLDER OUT_FOLDER
  convert  take over a checkpoint of DeepSpeed, Hugging Face or nanoGPT:  partita convert SOURCE OUT_FOLDER

`partita train --help` lists config groups and keys; -m runs a sweep; --cfg job shows a config without running it.
"""


def train(argv: Sequence[str] | None = None) -> int:
    """Train what the command line says; returns the exit status."""
    return hydra_main(train_job, argv=argv, app="train")


def plan(argv: Sequence[str] | None = None) -> int:
    """Show the plan of a command line, for this machine or for a described cluster; starts nothing and writes nothing."""
    return hydra_main(plan_job, argv=argv, app="plan", folder=False)


def calibrate(argv: Sequence[str] | None = None) -> int:
    """Measure this machine and store what it reaches, for plans; returns the exit status."""
    return hydra_main(calibrate_job, argv=argv, app="calibrate", folder=False)


def calibrate_job(config: Any, info: JobInfo) -> dict[str, Any]:
    """Arithmetic in this process, links between ranks. Under torchrun or Slurm on several nodes, links between nodes too."""
    from dataclasses import replace

    from partita.plan.calibration import calibration_file, write_calibration
    from partita.plan.cluster import find_cluster, this_machine
    from partita.plan.plan import Layout, Plan
    from partita.runtime.calibrate import arithmetic, assemble, links, report
    from partita.runtime.launch import launch
    from partita.runtime.scratch import scratch_folder
    from partita.runtime.spec import RunSpec

    path = calibration_file(config.cluster.calibration)
    if path is None:
        raise ConfigError("cluster.calibration: none keeps no measurement\n    -> leave it out, or give a file")
    cluster = find_cluster(config.cluster, config.launch)
    if cluster.described:
        raise ConfigError("cluster: a described cluster is not here to be measured\n    -> cluster=auto")
    ranks = cluster.ranks or max(2, cluster.cores)
    local = arithmetic()
    with scratch_folder("calibrate") as folder:
        job = replace(info, dir=folder)
        found = launch(links, RunSpec(to_plain(config), Plan(Layout(shard=ranks)), job, ranks), ranks)
    if joined_rank() in (None, 0):
        value, key = assemble(local, found), this_machine(cluster)
        write_calibration(path, key, value)
        print(report(value, key, path))
    return {}


def train_job(config: Any, info: JobInfo) -> dict[str, Any]:
    """One run: plan, show, refuse what can't be run, start the ranks. Returns rank 0's summary."""
    from partita.plan.make import make_plan
    from partita.plan.table import print_plan
    from partita.runtime.restarts import Bounds, launch_lasting
    from partita.runtime.spec import RunSpec
    from partita.train.run import worker

    registry = registry_for(tuple(config.plugins.block))
    planned = with_trials(make_plan(config, registry), config, info, registry)
    first = joined_rank() in (None, 0)
    if first:
        _show_translation(info)
    if first and not planned.problems:
        print_plan(planned)
    planned.raise_problems()
    plain = to_plain(config)
    if first:
        planned.save(info.dir)
        if info.translation is not None:
            (info.dir / "deepspeed.txt").write_text(info.translation.text() + "\n")
        write_config(info.dir / "config.yaml", plain)
    spec = RunSpec(to_plain(planned.config), planned.plan, info, planned.plan.layout.world, registry.blocked)
    bounds = Bounds(config.launch.restarts, config.launch.min_ranks, config.launch.cooldown, memory=config.train.memory_every > 0)
    again = replanner(config, info, registry, bounds.min_ranks, planned.plan)
    return launch_lasting(worker, spec, again, bounds)


def with_trials(planned: Any, config: Any, info: JobInfo, registry: Registry) -> Any:
    """The plan, or the one that is fastest when the planner's best `parallel.trials` are measured on this machine."""
    from partita.plan.make import make_plan, wanted_trials

    if not wanted_trials(config) or planned.choice is None or planned.problems or len(planned.choice.ranked) < 2:
        return planned
    if joined_rank() is not None:
        raise ConfigError(
            "parallel.trials: ranks that another launcher starts can't be started again for each trial\n"
            "    -> parallel.trials=0, or start with python and let Partita start the ranks"
        )
    from partita.train.trials import measured_choice

    return make_plan(config, registry, measured_choice(config, planned.choice, registry, info))


def replanner(config: Any, info: JobInfo, registry: Registry, least: int, plan: Any) -> Callable[[int], Any]:
    """A function from a number of ranks to the same run for that many, or as few less as a plan needs: same global batch.

    It returns None where fewer than `least` are left, or no plan exists.
    """
    from partita.plan.make import make_plan
    from partita.runtime.spec import MEMORY, RunSpec
    from partita.train.index import list_checkpoints

    def saves() -> list[str]:
        return [c.attempt for c in list_checkpoints(info.dir / "checkpoints")]

    before = saves()

    def again(ranks: int) -> RunSpec | None:
        for count in range(ranks, least - 1, -1):
            changed = config if count == plan.layout.world else with_ranks(config, count, plan.schedule.global_batch)
            planned = make_plan(changed, registry)
            if not planned.problems:
                planned.save(info.dir)
                plain = to_plain(planned.config)
                if saves()[-1:] != before[-1:] or any((info.dir / MEMORY).glob("step-*")):
                    plain["train"]["resume"] = "auto"
                return RunSpec(plain, planned.plan, info, count, registry.blocked)
        return None

    return again


def with_ranks(config: Any, ranks: int, global_batch: int) -> Any:
    """The config for another number of ranks: the data axis follows, all other degrees and the global batch stay."""
    changed = copy.deepcopy(config)
    changed.launch.ranks, changed.train.global_batch = ranks, global_batch
    parallel = getattr(changed, "parallel", None)
    for axis in ("data", "replicate"):
        if hasattr(parallel, axis):
            setattr(parallel, axis, "auto")
    return changed


def _show_translation(info: JobInfo) -> None:
    if info.translation is not None:
        print(info.translation.text(), flush=True)


def plan_job(config: Any, info: JobInfo) -> dict[str, Any]:
    """Print one plan, and its problems as an error."""
    from partita.plan.make import make_plan
    from partita.plan.table import print_plan

    planned = make_plan(config, registry_for(tuple(config.plugins.block)))
    if joined_rank() in (None, 0):
        _show_translation(info)
        print_plan(planned, problems=False)  # they follow, as the error
        sys.stdout.flush()
    planned.raise_problems()
    return {}


def write_config(path: Path, plain: Mapping[str, Any]) -> None:
    """The resolved config as YAML, complete or not there."""
    import yaml

    part = path.with_name(path.name + ".partial")
    part.write_text(yaml.safe_dump(dict(plain), sort_keys=False))
    os.replace(part, path)


# ------------------------------------------------------------------ plug-ins


def plugins(argv: Sequence[str] | None = None) -> int:
    """List what is installed; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)

    def listing() -> int:
        wrong = [a for a in argv if not a.startswith("plugins.block=")]
        if wrong:
            raise ConfigError(f"{wrong[0]}: `plugins` takes no such argument\n    -> only plugins.block=[name,...], or nothing")
        print(render(Registry.load(block_from_argv(argv)).describe(), width=get_terminal_size((160, 24)).columns))
        return EXIT_DONE

    return guarded(listing)


def guarded(command: Callable[[], int]) -> int:
    """Run a command that is no Hydra job; our errors cost a message, not a traceback."""
    try:
        return command()
    except PartitaError as error:
        report(error)
        return error.exit_status


# ------------------------------------------------------------------ the console script


def main() -> int:
    """`partita COMMAND ...`; returns the exit status."""
    argv = sys.argv[1:]
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "train": train,
        "plan": plan,
        "plugins": plugins,
        "translate": translate,
        "export": export,
        "convert": convert,
    }
    if argv and argv[0] in ("-sc", "--shell-completion"):
        return _complete(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return EXIT_DONE if argv else EXIT_CONFIG
    if argv[0] not in commands:
        print(f"partita: no command {argv[0]!r}; {did_you_mean(argv[0], commands)}\n\n{USAGE}", end="", file=sys.stderr)
        return EXIT_CONFIG
    sys.argv = [f"{sys.argv[0]} {argv[0]}", *argv[1:]]
    return commands[argv[0]](argv[1:])


def _complete(argv: Sequence[str]) -> int:
    """Hydra's completion knows no subcommands: it sees the line without ours."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    if len(words) > 2 and words[1] in ("train", "plan"):
        line = " ".join([words[0], *words[2:]])
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    return train(argv)


def translate(argv: Sequence[str] | None = None) -> int:
    """Print the native YAML of a DeepSpeed config, and on the error stream what became of each key; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _translate(argv))


def _translate(argv: Sequence[str]) -> int:
    from partita.config.compose import compose_config
    from partita.config.deepspeed.apply import native_of, translate_source

    if not argv or any(a.startswith("-") for a in argv):
        raise ConfigError("translate takes a DeepSpeed config\n    -> partita translate ds_config.json [KEY=VALUE ...]")
    config, _ = compose_config(argv[1:])
    said = frozenset(a.lstrip("+~").partition("=")[0] for a in argv[1:])
    translation = translate_source(argv[0], native_of(config, registry_for(tuple(config.plugins.block)), said))
    print(translation.text(), file=sys.stderr, flush=True)
    _print_yaml(translation.native())
    return EXIT_CONFIG if translation.problems() else EXIT_DONE


def _print_yaml(values: Mapping[str, Any]) -> None:
    import yaml

    print(yaml.safe_dump(dict(values), sort_keys=False), end="")


def export(argv: Sequence[str] | None = None) -> int:
    """Write the weights of a run's newest checkpoint as a folder that Hugging Face loads; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _export(argv))


def _export(argv: Sequence[str]) -> int:
    if len(argv) != 2 or any(a.startswith("-") for a in argv):
        usage = "partita export RUN_FOLDER OUT_FOLDER; a checkpoint's folder in place of the run's takes that checkpoint"
        raise ConfigError(f"export takes a run's folder and a folder to write\n    -> {usage}")
    from partita.models.export import export_run

    export_run(Path(argv[0]), Path(argv[1]))
    print(f"written: {Path(argv[1]).absolute()}")
    return EXIT_DONE


def convert(argv: Sequence[str] | None = None) -> int:
    """Take over a checkpoint of DeepSpeed (ZeRO 0 to 3), Hugging Face or nanoGPT, without starting ranks; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _convert(argv))


def _convert(argv: list[str]) -> int:
    from argparse import ArgumentParser

    parser = ArgumentParser("partita convert", description="A foreign checkpoint as one that train.resume=OUT goes on from.")
    parser.add_argument("source", help="DeepSpeed folder, Hugging Face folder, nanoGPT's ckpt.pt, or a run of Partita")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--model", default="auto", help="whose names: gpt, llama, bert, hf, as_is; default: as the source says")
    parser.add_argument("--safetensors", action="store_true", help="write model.safetensors instead of a checkpoint")
    args = parser.parse_args(argv)
    from partita.train.foreign.convert import convert as to_checkpoint
    from partita.train.foreign.convert import to_safetensors

    path, read = (to_safetensors if args.safetensors else to_checkpoint)(args.source, args.out, args.model)
    print(
        f"{read.what}: {len(read.weights)} weights, states {', '.join(read.states) or 'none'}, step {read.step}\nwritten: {path}"
    )
    for note in read.notes:
        print(f"note: {note}")
    if read.model and not args.safetensors:
        keys = {k: v for k, v in read.model.items() if k != "name" and v is not None}
        print(
            f"go on with: model={read.model['name']} "
            + " ".join(f"model.{k}={v}" for k, v in keys.items())
            + f" train.resume={args.out}"
        )
    return EXIT_DONE
