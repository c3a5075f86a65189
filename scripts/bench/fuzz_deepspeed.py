"""Mutates DeepSpeed configs and demands a clean outcome of each: a translation, or refusals with key, reason and remedy.

    python scripts/bench/fuzz_deepspeed.py 100000 [SEED]

Keys are moved, doubled, mistyped, swapped and removed; values get other types, ranges, placeholders and "auto"; text is damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partita.config.compose import registry_for
from partita.config.deepspeed.apply import apply
from partita.config.deepspeed.report import VERDICTS
from partita.config.deepspeed.walk import TABLE
from partita.config.plain import root_type
from partita.errors import EXIT_CONFIG, ConfigError

Tree = dict[str, Any]
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 7, 0.5, 1e-8, 5e8, 1e14, 2**70, float("inf"), float("nan"), "auto", "AUTO", "", "8", "5e8", "true",
    "cpu", "nvme", "none", "$STAGE", "${lr}", "CONFIG_FP16_ENABLED", "<value>", [], [1], [0.9, 0.999], ["a"], {}, {"enabled": True},
    {"enabled": "auto"}, {"type": "Adam"}, {"a": {"b": {"c": 1}}}, "x" * 2000, "\x00", "é", "\ud800",
]  # fmt: skip
PATHS = [
    *TABLE.rules,
    *TABLE.sections,
    *TABLE.aliases,
    *TABLE.strangers,
    "optimizer",
    "optimizer.params.lr",
    "scheduler.params.warmup_num_steps",
]


def nodes(tree: Any) -> list[Tree]:
    """All objects inside a tree, itself included."""
    found = [tree] if isinstance(tree, dict) else []
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        found += nodes(value)
    return found


def mutate(tree: Tree, draw: random.Random) -> Tree:
    """A copy with one to three changes."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 2, 3])):
        draw.choice(CHANGES)(tree, draw)
    return tree


def _value(tree: Tree, draw: random.Random) -> None:
    node = draw.choice(nodes(tree))
    if node:
        node[draw.choice(list(node))] = copy.deepcopy(draw.choice(VALUES))


def _known(tree: Tree, draw: random.Random) -> None:
    *parents, leaf = draw.choice(PATHS).split(".")
    node = tree
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[leaf] = copy.deepcopy(draw.choice(VALUES))


def _rename(tree: Tree, draw: random.Random) -> None:
    node = draw.choice(nodes(tree))
    if node:
        key = draw.choice(list(node))
        at = draw.randrange(len(key) + 1)
        node[draw.choice([key[:at] + key[at + 1 :], key + " ", key.upper(), key[::-1], key + "s", "_" + key])] = node.pop(key)


def _remove(tree: Tree, draw: random.Random) -> None:
    node = draw.choice(nodes(tree))
    if node:
        del node[draw.choice(list(node))]


def _move(tree: Tree, draw: random.Random) -> None:
    source, target = draw.choice(nodes(tree)), draw.choice(nodes(tree))
    if source:
        key = draw.choice(list(source))
        target[key] = copy.deepcopy(source[key])


CHANGES: list[Callable[[Tree, random.Random], None]] = [_value, _value, _known, _known, _rename, _remove, _move]


def damage(text: str, draw: random.Random) -> str:
    """Text with a few characters changed."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        text = (
            text[:at]
            + draw.choice(["", "{", "}", "[", "]", ",", ":", '"', "'", "//", "/*", "#", "\\", "\n", "\ufeff", "$A", "1e999"])
            + text[at + draw.randint(0, 2) :]
        )
    return text


class Checker:
    """Judges one text after another."""

    def __init__(self, folder: Path) -> None:
        self.registry = registry_for(())
        self.root = root_type(self.registry)
        self.folder = folder

    def check(self, text: str, name: str = "config.json") -> str:
        """`plan` or `refused`. Raises AssertionError for an outcome that is not clean; anything else is a bug and comes through."""
        path = self.folder / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        config = self.root(deepspeed=str(path))
        try:
            translation = apply(config, self.registry, [])
        except ConfigError as caught:
            refused = caught
        else:
            return self._translated(translation)
        message = str(refused)
        assert refused.exit_status == EXIT_CONFIG
        assert "\n    -> " in message or "shown when these are repaired" in message, message
        assert len(message.splitlines()) <= 40, message
        assert "Traceback" not in message
        return "refused"

    @staticmethod
    def _translated(translation: Any) -> str:
        assert translation is not None
        assert translation.lines
        assert all(line.verdict in VERDICTS and (line.key or line.why) for line in translation.lines)
        return "translated"


def texts(sources: list[str], draw: random.Random) -> tuple[str, str]:
    """(name of the file, text) of one mutated config."""
    text = draw.choice(sources)
    tree = None
    with contextlib.suppress(ValueError):
        tree = json.loads(text)
    if tree is None:
        return draw.choice(["config.json", "config.yaml"]), damage(text, draw)
    text = json.dumps(mutate(tree, draw), ensure_ascii=draw.random() < 0.9)
    if draw.random() < 0.15:
        text = damage(text, draw)
    return draw.choice(["config.json", "config.json", "config.hjson", "config.yaml"]), text


def run(count: int, seed: int, sources: list[str]) -> Counter[str]:
    """Outcomes of `count` mutated configs."""
    draw, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        checker = Checker(Path(folder))
        for i in range(count):
            name, text = texts(sources, draw)
            try:
                outcomes[checker.check(text, name)] += 1
            except Exception:
                print(f"number {i} of seed {seed}, as {name}:\n{text}", file=sys.stderr)
                raise
    return outcomes


def main() -> int:
    """Fuzz over the files of the tests; returns the exit status."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "config"))
    from deepspeed_files import FILES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=10000, help="configs")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    outcomes = run(args.count, args.seed, [text for _, text in FILES.values()])
    print(f"{args.count} mutated configs in {time.perf_counter() - started:.0f} s: {dict(outcomes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
