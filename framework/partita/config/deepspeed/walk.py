"""Carries out the tables: each key of a file meets its rule, and nothing is left without a line in the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partita.config.deepspeed import combine, training
from partita.config.deepspeed.report import FILLED, REFUSED, TAKEN, UNNEEDED, Line, Translation
from partita.config.deepspeed.rules import (
    AUTO,
    Cases,
    Deny,
    Drop,
    Later,
    Outcome,
    Rule,
    Section,
    Take,
    WrongValue,
    boolean,
    is_placeholder,
    shown,
)
from partita.config.deepspeed.table_rest import ACTIVATIONS, CHECKPOINTS, MODEL, PARALLEL
from partita.config.deepspeed.table_root import PRECISION, ROOT, WATCHING
from partita.config.deepspeed.table_zero import ZERO
from partita.errors import nearest

TABLE = ROOT | PRECISION | WATCHING | ZERO | PARALLEL | ACTIVATIONS | CHECKPOINTS | MODEL
TYPED_BY_NAME = ("optimizer", "scheduler")  # sections whose keys depend on their type: training.py
DEPTH = 32  # of sections; YAML can hold a value that contains itself


@dataclass
class Native:
    """What is known of our side. keys: config keys there are. slots: key -> names that plug-ins provide for it.

    current: value of a key as the command line and the defaults have it. ranks_given: the command line says how many ranks.
    """

    keys: frozenset[str]
    slots: Mapping[str, tuple[str, ...]]
    current: Callable[[str], Any]
    ranks_given: bool = False


@dataclass
class Work:
    """One translation at work. facts: converted values by canonical path ("auto" stays, null is None). blocks: sections there are."""

    native: Native
    out: Translation
    facts: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    pending: list[tuple[str, Rule, str]] = field(default_factory=list)
    _raw: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """Our keys so far."""
        return self.out.values

    @property
    def ranks_given(self) -> bool:
        """Whether the command line fixes the number of ranks."""
        return self.native.ranks_given

    def current(self, key: str) -> Any:
        """A value of ours as it is without the file."""
        return self.native.current(key)

    # ------------------------------------------------------------------ lines

    def _line(self, path: str, verdict: str, **more: Any) -> None:
        value = shown(self._raw[path]) if path in self._raw else "(not there)"
        self.out.lines.append(Line(self.written.get(path, path), value, verdict, **more))

    def take(self, path: str, key: str, got: Any, why: str = "") -> None:
        """Their key becomes ours."""
        if path not in self._raw:
            return
        if self._set(path, key, got):
            self._line(path, TAKEN, key=key, got=shown(got), why=why)

    def fill(self, path: str, key: str, got: Any, rule: str) -> None:
        """A value that the file leaves open. key empty: ours stays as it is."""
        if not key:
            self._line(path, FILLED, why=rule)
        elif self._set(path, key, got):
            self._line(path, FILLED, key=key, got=shown(got), why=rule)

    def overrule(self, key: str, why: str) -> None:
        """What has been taken over to a key of ours is not needed after all."""
        self.values.pop(key, None)
        for i, line in enumerate(self.out.lines):
            if line.key == key and line.verdict != REFUSED:
                self.out.lines[i] = Line(line.path, line.value, UNNEEDED, why=why)

    def drop(self, path: str, why: str) -> None:
        """Their key needs no counterpart."""
        if path in self._raw:
            self._line(path, UNNEEDED, why=why)

    def deny(self, path: str, why: str, remedy: str) -> None:
        """Their key can't be carried out. One refusal for each path."""
        name = self.written.get(path, path)
        if not any(line.path == name and line.verdict == REFUSED for line in self.out.lines):
            self._line(path, REFUSED, why=why, remedy=remedy)

    def wrong(self, path: str, value: Any, wanted: WrongValue | str) -> None:
        """A value that the key can't hold."""
        if is_placeholder(value):
            self.deny(path, f"{shown(value)} is a placeholder that nobody has filled", "write a value in its place")
        elif value == AUTO:
            self.deny(path, 'nobody fills this "auto"', f"write {wanted}, or leave it out")
        else:
            self.deny(path, f"{shown(value)} is not {wanted}", f"write {wanted}")

    def _set(self, path: str, key: str, got: Any) -> bool:
        if key.rpartition(".")[0].endswith(".options"):
            known = key.rpartition(".")[0] in self.native.keys
        else:
            known = key in self.native.keys
        if not known:
            self.deny(
                path,
                f"it would become {key}, which this installation has no key for",
                "install or unblock the plug-in, or leave it out",
            )
            return False
        if key in self.values and self.values[key] != got:
            self.deny(path, f"{key} would be {shown(got)} and {shown(self.values[key])} at once", "leave one of the two out")
            return False
        self.values[key] = got
        return True

    # ------------------------------------------------------------------ what rules and combinations ask

    def known(self, key: str, name: str) -> bool:
        """Whether a plug-in provides a name for a key."""
        return name in self.native.slots.get(key, ())

    def names(self, key: str) -> str:
        """All names for a key."""
        return ", ".join(sorted(self.native.slots.get(key, ())))

    def section_given(self, path: str) -> bool:
        """Whether a section stands in the file, not null."""
        return bool(self.blocks.get(path))

    def block(self, path: str, keys: Iterable[str] | None) -> dict[str, Any] | None:
        """A section of `TYPED_BY_NAME`, or their params; strangers beside `keys` are refused. None: not there."""
        *parents, leaf = path.split(".")
        holder: Any = self._raw
        value = holder.get(path) if not parents else (self.blocks.get(".".join(parents)) or {}).get(leaf)
        if value is None:
            if path in self._raw:
                self.drop(path, "null: as if left out")
            return None
        if not isinstance(value, dict):
            self._raw[path] = value
            self.wrong(path, value, "a block of keys")
            return None
        block = {str(k): v for k, v in value.items()}
        self.blocks[path] = block
        self._raw |= {f"{path}.{k}": v for k, v in block.items()}
        if isinstance(block.get("type"), str):
            self.facts[f"{path}.type"] = block["type"]
        if keys is not None:
            self.unknown(path, block, dict.fromkeys(keys))
        return block

    def unknown(self, path: str, found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Refuse keys of a block that no rule names."""
        for key in found:
            if key not in known and not self._comment(f"{path}.{key}", key):
                self._stranger(f"{path}.{key}", key, [f"{path}.{k}" for k in known])

    def apply(self, path: str, found: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
        """Rules for a block; what is left out and has a default of DeepSpeed's is filled."""
        for key, value in found.items():
            if key in rules:
                self.convert(f"{path}.{key}", value, rules[key])
        for key, rule in rules.items():
            if key not in found and rule.default is not None and isinstance(rule.then, Take):
                self.fill(f"{path}.{key}", rule.then.key, rule.default, "DeepSpeed's default")
        self.unknown(path, found, rules)

    def defaults(self, section: str) -> None:
        """DeepSpeed's defaults of a section of `TABLE` for the keys that the file leaves out."""
        for path, rule in TABLE.rules.items():
            if (
                path.startswith(section + ".")
                and path not in self._raw
                and rule.default is not None
                and isinstance(rule.then, Take)
            ):
                got = rule.then.mapping(rule.default) if callable(rule.then.mapping) else rule.default
                self.fill(path, rule.then.key, got, "DeepSpeed's default")

    def convert(self, path: str, value: Any, rule: Rule) -> None:
        """One key: its value is read, and what becomes of it follows at once."""
        if self.read(path, value, rule):
            self.outcome(path, self.facts[path], rule.then)

    def read(self, path: str, value: Any, rule: Rule) -> bool:
        """Convert a value into `facts`; false where the line is written already (null, auto, wrong)."""
        self._raw[path] = value
        later = isinstance(rule.then, Later)
        if value is None:
            self.facts[path] = None
            self.drop(path, "null: as if left out")
            return False
        if isinstance(value, str) and value.strip().lower() == AUTO:
            self.facts[path] = AUTO
            if later and (rule.auto or path == combine.STAGE):
                return True
            if not rule.auto:
                return self._auto_unfilled(path, rule)
            self.fill(path, "", None, rule.auto)
            return False
        try:
            self.facts[path] = rule.kind(value)
        except WrongValue as wanted:
            self.wrong(path, value, wanted)
            return False
        return True

    def _auto_unfilled(self, path: str, rule: Rule) -> bool:
        if isinstance(rule.then, Drop | Cases):
            self.fill(path, "", None, "Partita's default; DeepSpeed takes its own")
        else:
            self.deny(path, 'nobody fills this "auto"', "write a value, or leave it out")
        return False

    def outcome(self, path: str, value: Any, then: Outcome) -> None:
        """What becomes of a converted value."""
        if isinstance(then, Cases):
            then = then.cases.get(value, then.otherwise)
        if isinstance(then, Drop):
            self.drop(path, then.why)
        elif isinstance(then, Deny):
            if _among(value, then.unless):
                self.drop(path, "off")
            else:
                self.deny(path, then.why, then.remedy)
        elif isinstance(then, Take):
            mapping = then.mapping
            got = mapping(value) if callable(mapping) else mapping.get(value, value) if mapping else value
            self.take(path, then.key, got, then.note)

    # ------------------------------------------------------------------ the walk

    def walk(self, tree: Mapping[Any, Any], path: str = "", off: str = "", open_: str = "", depth: int = 0) -> None:
        """Read all keys below a section. off: why nothing of it is needed. open_: why strangers are not needed."""
        for key, value in tree.items():
            name = str(key)
            full = f"{path}.{name}" if path else name
            self._raw[full] = value
            if depth > DEPTH:
                self.deny(full, f"sections are nested more than {DEPTH} deep", "write a DeepSpeed config")
                continue
            canonical = self._canonical(full, name, path, tree)
            if canonical is not None:
                self._one(canonical, value, off, open_, depth, path)

    def _canonical(self, full: str, name: str, path: str, tree: Mapping[Any, Any]) -> str | None:
        """The path that the tables know; None where the key has been told of."""
        if name != name.strip():
            self.deny(full, f"the key {name!r} has spaces around it, so DeepSpeed ignores it", f"write {name.strip()!r}")
            return None
        known = TABLE.aliases.get(full, full)
        if known != full:
            leaf = known.rpartition(".")[2]
            if leaf in tree or known in self._raw:
                self.deny(full, f"it is another name of {known}, which stands there too", "keep one of them")
                return None
            self._raw[known] = self._raw[full]
            self.written[known] = full
        return known

    def _one(self, path: str, value: Any, off: str, open_: str, depth: int, parent: str) -> None:
        if path in TYPED_BY_NAME:
            self.blocks[path] = value if isinstance(value, dict) else {}
        elif path in TABLE.sections:
            self._section(path, value, off, depth)
        elif path in TABLE.rules:
            rule = TABLE.rules[path]
            if self.read(path, value, rule):
                self.pending.append((path, rule, off if not path.endswith(".enabled") else ""))
        elif not self._comment(path, path.rpartition(".")[2]):
            if open_:
                self.drop(path, open_)
            elif isinstance(value, dict) and value.get("enabled") is False and not parent:
                self.drop(path, "DeepSpeed does not read it, and it is switched off")
            else:
                self._stranger(path, path.rpartition(".")[2], [*TABLE.rules, *TABLE.sections, *TYPED_BY_NAME], parent)

    def _section(self, path: str, value: Any, off: str, depth: int) -> None:
        section = TABLE.sections[path]
        if value is None:
            self.drop(path, "null: as if left out")
            return
        if path == "zero_optimization" and isinstance(value, bool):
            self.facts[combine.STAGE] = int(value)
            self._raw[combine.STAGE] = value
            self.written[combine.STAGE] = path
            return
        if not isinstance(value, dict):
            self.wrong(path, value, "a block of keys")
            return
        self.blocks[path] = value
        prefix = self.written.get(path)
        if prefix:
            self.written |= {f"{path}.{k}": f"{prefix}.{k}" for k in value}
        if not value:
            self.drop(path, "the section is empty")
        self.walk(value, path, off or self._idle(path, value, section), section.open, depth + 1)

    def _idle(self, path: str, value: Mapping[Any, Any], section: Section) -> str:
        """Why nothing of a section is needed; empty where it is on."""
        if section.switch is None:
            return ""
        given = value.get(section.switch)
        if section.needed and given is None and section.switch not in value:
            self.deny(path, f"it needs {section.switch}", f'write "{section.switch}": true or false')
        if given == AUTO and path in combine.MODES:
            return "" if self.current("precision.name") == path else section.idle
        try:
            on = boolean(given) if given is not None else section.on_by_default
        except WrongValue:
            on = False
        return "" if on else section.idle

    def _comment(self, path: str, name: str) -> bool:
        if name.startswith(("_", "//", "#")) or name.lower() in ("comment", "comments", "$schema"):
            self.drop(path, "a comment")
            return True
        return False

    def _stranger(self, path: str, name: str, known: Iterable[str], parent: str = "") -> None:
        if path in TABLE.strangers:
            self.deny(path, f"DeepSpeed has no such key here: {TABLE.strangers[path]}", "take it out or correct it")
            return
        if is_placeholder(name):
            self.deny(path, f"{name} is a placeholder that nobody has filled", "write a key in its place")
            return
        by_leaf: dict[str, list[str]] = {}
        for k in [*known, *TABLE.aliases]:
            by_leaf.setdefault(k.rpartition(".")[2], []).append(k)
        near = [p for leaf in ([name] if name in by_leaf else nearest(name, by_leaf)) for p in by_leaf[leaf]]
        near.sort(key=lambda p: p.rpartition(".")[0] != parent)
        where = (
            "DeepSpeed refuses it"
            if parent and parent not in ("activation_checkpointing", "aio", "checkpoint", "pipeline")
            else ("DeepSpeed ignores it without a word")
        )
        remedy = f"did you mean {' or '.join(near[:3])}?" if near else "take it out"
        self.deny(path, f"there is no such key, and {where}", remedy)


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(v) and value == v for v in values) or any(
        isinstance(v, int | float) and not isinstance(v, bool) and not isinstance(value, bool) and value == v for v in values
    )


def translate(tree: Mapping[str, Any], where: str, native: Native) -> Translation:
    """The translation of a DeepSpeed config. Nothing is raised: what can't be carried out is a line `refused`."""
    work = Work(native, Translation(where))
    work.walk(tree)
    bad = {clash.path: clash for clash in combine.clashes(_with_types(work, tree))}
    for path, clash in bad.items():
        work.deny(path, clash.why(work), clash.remedy)
    for path, rule, off in work.pending:
        _settle(work, path, rule, off, set(bad))
    combine.batch(work)
    combine.precision(work)
    combine.zero(work)
    training.optimizer(work)
    training.scheduler(work)
    combine.gradients_follow(work)
    order = {work.written.get(path, path): i for i, path in enumerate(work._raw)}
    work.out.lines = _once(sorted(work.out.lines, key=lambda line: order.get(line.path, len(order))))
    return work.out


def _with_types(work: Work, tree: Mapping[str, Any]) -> Work:
    kind = tree.get("optimizer")
    if isinstance(kind, dict) and isinstance(kind.get("type"), str):
        work.facts["optimizer.type"] = kind["type"]
    return work


def _settle(work: Work, path: str, rule: Rule, off: str, bad: set[str]) -> None:
    if path in bad or isinstance(rule.then, Later):
        return
    if off:
        work.drop(path, off)
        return
    if rule.needs is not None:
        other, values, why = rule.needs
        if work.facts.get(other) not in values and not (work.facts.get(other) == AUTO and None in values):
            work.drop(path, why)
            return
    work.outcome(path, work.facts[path], rule.then)


def _once(lines: Iterable[Line]) -> list[Line]:
    """One line for each path: a refusal counts before anything else; a default that the file gives itself is no line."""
    best: dict[tuple[str, str], Line] = {}
    refused = {line.path for line in lines if line.verdict == REFUSED}
    for line in lines:
        if line.path in refused and line.verdict != REFUSED:
            continue
        best.setdefault((line.path, line.key if line.verdict == FILLED else ""), line)
    return list(best.values())
