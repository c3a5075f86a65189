"""What `partita plugins` prints: each plug-in, where it comes from, what it adds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from partita.plugin.registry import PluginInfo

INDENT = 10


def render(plugins: Iterable[PluginInfo], width: int = 100) -> str:
    """Plain text, a paragraph for each plug-in, at most `width` columns (long paths excepted)."""
    return "\n\n".join("\n".join(_paragraph(p, width)) for p in plugins)


def _paragraph(plugin: PluginInfo, width: int) -> Iterator[str]:
    blocked = "   blocked, not imported" if plugin.blocked else ""
    yield f"{plugin.name}   {plugin.distribution} {plugin.version}{blocked}"
    for title, words in _rows(plugin):
        if words:
            lead = f"  {title:{INDENT - 2}}"
            yield textwrap.fill(
                " ".join(words),
                width,
                initial_indent=lead,
                subsequent_indent=" " * INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )


def _rows(plugin: PluginInfo) -> Iterator[tuple[str, list[str]]]:
    yield "from", [plugin.entry_point, plugin.location]
    yield "hooks", [hook.removeprefix("partita_") for hook in plugin.hooks]
    yield "plan", list(plugin.sections)
    yield "config", [f"{node}.*" for node in plugin.nodes]
    yield "options", [f"{group}={'|'.join(names)}" for group, names in plugin.groups]
    yield "slots", [f"{slot}={'|'.join(names)}" for slot, names in plugin.slots]
