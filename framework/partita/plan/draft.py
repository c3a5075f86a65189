"""A plan being made: strategies read what is decided, write their own sections, and tell what differs from what was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from partita.errors import PluginError, did_you_mean
from partita.plan.cluster import Cluster
from partita.plan.manifest import Line
from partita.plan.plan import SECTIONS, Plan
from partita.plan.problems import Problem

if TYPE_CHECKING:
    from partita.plan.model_spec import ModelSpec
    from partita.plan.stages import Anatomy

DEFAULT = Plan()


@dataclass
class PlanDraft:
    """What `partita_decide`, `partita_check` and `partita_estimate` are given.

    config: plain dataclasses, one attribute for each node. owners: section -> plug-in that may write it; a section not in it is
    open to everyone. owner: the plug-in whose `partita_decide` runs now; the registry sets it. rules: update
    rules of the run, the main one first. cache: for what is costly to find out (traces of the model).
    """

    config: Any
    model: ModelSpec
    cluster: Cluster
    owners: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    rules: Sequence[Any] = ()
    sections: dict[str, Any] = field(default_factory=dict)
    extensions: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def get(self, section: str) -> Any:
        """The section's value as decided so far, or its default."""
        self._known(section)
        return self.sections.get(section, getattr(DEFAULT, section))

    def write(self, section: str, value: Any) -> None:
        """Decide a section, once. Raises PluginError for a stranger, a wrong type and a second writer."""
        self._known(section)
        owner = self.owners.get(section, self.owner)
        if owner != self.owner:
            raise PluginError(
                f"plug-in {self.owner!r} wrote plan section {section!r}, which {owner!r} owns; block one of the two."
            )
        if section in self.sections:
            raise PluginError(f"plug-in {self.owner!r} wrote plan section {section!r} twice; a section is decided once.")
        wanted = type(getattr(DEFAULT, section))
        if not isinstance(value, wanted):
            raise PluginError(
                f"plug-in {self.owner!r} wrote a {type(value).__name__} into plan section {section!r}; "
                f"it takes a {wanted.__name__}."
            )
        self.sections[section] = value

    def extend(self, name: str, value: Any) -> None:
        """Add a value of the plug-in's own to the plan, under a name that nobody else has taken. It must be picklable."""
        if name in SECTIONS or name in self.extensions:
            raise PluginError(f"plug-in {self.owner!r} adds {name!r} to the plan, but that name is taken.")
        self.extensions[name] = value

    def effect(self, key: str, asked: Any, got: Any, reason: str = "") -> None:
        """A line of the manifest: `key` was asked to be `asked`, and `got` is in effect, because of `reason`."""
        self.lines.append(Line(key, asked, got, reason))

    def problem(self, problem: Problem) -> None:
        """Something that keeps the plan from being run. Planning goes on, so that all problems are found at once."""
        self.problems.append(problem)

    def freeze(self) -> Plan:
        """The plan, with defaults for sections that nobody decided."""
        return Plan(**self.sections, extensions=MappingProxyType(dict(self.extensions)))

    def state_bytes(self, plan: Plan) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer states on the fullest rank, padding included."""
        from partita.plan.memory import state_bytes  # torch is imported only where a plan is made

        return state_bytes(self, plan)

    def rule_layouts(self, plan: Plan) -> list[Any]:
        """What layouts need to know of the update rules (`partita.state.layout.RuleLayout`)."""
        from partita.state.layout import RuleLayout  # torch is imported only where a plan is made

        return [RuleLayout.of(rule, plan.precision.optimizer) for rule in self.rules]

    def unit_input_bytes(self, plan: Plan) -> int:
        """Bytes of the largest input of a block for one micro-batch: what recompute keeps and a pipeline sends."""
        from partita.plan.kept import trace

        return max((unit.input for unit in trace(self, plan).units.values()), default=0)

    def anatomy(self) -> Anatomy:
        """Where the model can be cut into stages."""
        from partita.plan.stages import anatomy_of

        return anatomy_of(self.model)

    def block_bytes(self, dtype: str) -> tuple[int, int]:
        """Bytes of the root and of the largest block when their weights are whole, in the dtype of that name."""
        from partita.state.layout import size_of

        root = sum(u.numel for u in self.model.units if u.name == self.model.root)
        block = max((u.numel for u in self.model.units if u.name != self.model.root), default=0)
        return root * size_of(dtype), block * size_of(dtype)

    def _known(self, section: str) -> None:
        if section not in SECTIONS:
            raise PluginError(f"plug-in {self.owner!r} asked for plan section {section!r}; {did_you_mean(section, SECTIONS)}")
