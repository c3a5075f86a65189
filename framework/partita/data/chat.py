"""Conversations for supervised fine-tuning: what a row says, and as which text a model reads it.

A row has `messages` (role and content), `conversations` (from and value), `prompt` and `completion` (or `response`), or `instruction`,
`input` and `output`. Conversations are written by a Jinja template, the tokenizer's own where it has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from partita.data.rows import Row
from partita.errors import ConfigError, PartitaError, did_you_mean

Message = dict[str, Any]
Segment = tuple[str, bool]  # text, and whether it is to be learnt

ASSISTANT = "assistant"
ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
TEMPLATES = {
    # OpenAI's chat markup
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


class RowError(ValueError):
    """What is wrong with a row, without its place."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, compiled when first used. tokens: special ones by name (`bos_token`, `eos_token`, ...), which templates write."""

    source: str
    where: str
    tokens: dict[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """The text of a conversation. prompt: followed by what introduces the assistant's next turn. Raises RowError."""
        try:
            return str(self._compiled(messages=messages, add_generation_prompt=prompt, tools=None, documents=None, **self.tokens))
        except Exception as error:  # a template may raise anything, on purpose too
            raise RowError(f"the chat template of {self.where} refuses it: {error}") from error

    @cached_property
    def _compiled(self) -> Callable[..., str]:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def to_json(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.source).render
        except TemplateError as error:
            raise ConfigError(
                f"data.template: {self.where} is no Jinja template: {error}\n    -> data.template=chatml"
            ) from error

    def segments(self, messages: Sequence[Message]) -> Iterator[Segment]:
        """The text in pieces: the assistant's turns are to be learnt, what stands before them is not. Raises RowError."""
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:i], prompt=True)
            after = self.render(messages[: i + 1], prompt=False)
            if not before.startswith(done) or not after.startswith(before):
                raise RowError(
                    f"the chat template of {self.where} writes earlier turns in another way when later ones follow, so it can't be told "
                    "what the assistant says; use data.template=chatml, or a template that only adds"
                )
            yield before[len(done) :], False
            yield after[len(before) :], True
            done = after


def find_template(config: Any) -> ChatTemplate:
    """The template that `data.template` names: `auto` (the tokenizer's own, else chatml), a name, or a file."""
    asked, folder = config.data.template, Path(config.data.tokenizer).expanduser()
    if asked == "auto":
        return _of_tokenizer(folder) or ChatTemplate(TEMPLATES["chatml"], "chatml")
    if asked in TEMPLATES:
        return ChatTemplate(TEMPLATES[asked], asked)
    path = Path(asked).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"data.template: {asked!r} is neither a name nor a file\n    -> {did_you_mean(asked, ['auto', *TEMPLATES])}, or a Jinja file"
        )
    return ChatTemplate(path.read_text(encoding="utf-8"), str(path), _tokens(_settings(folder)))


def _of_tokenizer(folder: Path) -> ChatTemplate | None:
    settings, file = _settings(folder), folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several by name
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    return ChatTemplate(source, str(folder), _tokens(settings)) if source else None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    return settings if isinstance(settings, dict) else {}


def _tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {k: v["content"] if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    return {k: v for k, v in found.items() if isinstance(v, str)}


# ------------------------------------------------------------------ rows


def segments_of(row: Row, column: str | None, template: ChatTemplate) -> list[Segment]:
    """The text of a row in pieces, and whether each is to be learnt. column: where the messages stand; None: as the row tells.

    Raises RowError.
    """
    if column is None and isinstance(row.get("prompt"), str):
        answer = row.get("completion", row.get("response"))
        if not isinstance(answer, str):
            raise RowError("`prompt` is text, and there is no text under `completion` or `response`")
        return [(row["prompt"], False), (answer, True)]
    found = list(template.segments(_messages(row, column)))
    if not found:
        raise RowError("no turn is the assistant's")
    return found


def _messages(row: Row, column: str | None) -> list[Message]:
    if column is not None:
        return _normal(row.get(column), column)
    for name in ("messages", "conversations", "conversation"):
        if row.get(name) is not None:
            return _normal(row[name], name)
    if isinstance(row.get("prompt"), list):
        return _normal([*row["prompt"], *(row.get("completion") or [])], "prompt")
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": row["output"]}]
    raise RowError(
        f"it has no conversation; its keys are {', '.join(map(str, row))}. Name the one with messages: data.column=KEY"
    )


def _normal(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise RowError(f"{name!r} is no list of messages")
    return [_message(m, name) for m in value]


def _message(message: Message, name: str) -> Message:
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if isinstance(content, list):  # parts, of which some may be pictures
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            raise RowError(f"a message of {name!r} holds something else than text")
        content = "".join(p["text"] for p in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise RowError(f"a message of {name!r} has no role and content (or from and value)")
    rest = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
    return rest | {"role": ROLES.get(role, role), "content": content}


def told(path: Path, number: int, error: RowError) -> PartitaError:
    """The error with the place of the row."""
    return PartitaError(f"data.path: {path}, row {number}: {error}")
