"""JSON as DeepSpeed's users write it: with comments, trailing commas, bare words, a byte-order mark (the Hjson subset it is read with).

A value is str, int, float, bool, None, list or dict. Text without quotes becomes a `Bare`: a placeholder that nobody filled looks so.
"""

from __future__ import annotations

import re
from typing import Any

DEPTH = 64  # nested brackets; a config needs ten
_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"']+")
_WORDS = {"true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"', "'": "'"}


class Bare(str):
    """Text that stood there without quotes."""

    __slots__ = ()


class HjsonError(ValueError):
    """What is wrong, with line and column."""


class Duplicate(HjsonError):
    """A key that stands twice in one object; `path` names it."""

    def __init__(self, path: str, where: str) -> None:
        super().__init__(f"{path!r} stands twice ({where})")
        self.path = path


def parse(text: str) -> Any:
    """The value that `text` holds. Raises HjsonError, never another error."""
    reader = _Reader(text.removeprefix("\ufeff"))
    reader.skip()
    value = reader.value("", 0)
    reader.skip()
    if reader.at < len(reader.text):
        raise reader.error(f"{reader.text[reader.at : reader.at + 20]!r} follows the end of the config")
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def where(self) -> str:
        before = self.text[: self.at]
        return f"line {before.count(chr(10)) + 1}, column {self.at - before.rfind(chr(10))}"

    def error(self, what: str) -> HjsonError:
        return HjsonError(f"{what} ({self.where()})")

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        if self.text.startswith("/*", self.at):
            raise self.error("a comment /* is not closed")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def value(self, path: str, depth: int) -> Any:
        if depth > DEPTH:
            raise self.error(f"brackets are nested more than {DEPTH} deep")
        start = self.peek()
        if start == "{":
            return self.members(path, depth)
        if start == "[":
            return self.items(path, depth)
        if start in ('"', "'") and start:
            return self.quoted(start)
        return self.word()

    def members(self, path: str, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        self.at += 1
        while self.more("}"):
            key = self.key()
            full = f"{path}.{key}" if path else key
            if key in out:
                raise Duplicate(full, self.where())
            self.skip()
            if self.peek() != ":":
                raise self.error(f"a colon must follow the key {key!r}")
            self.at += 1
            self.skip()
            out[key] = self.value(full, depth + 1)
        return out

    def items(self, path: str, depth: int) -> list[Any]:
        out: list[Any] = []
        self.at += 1
        while self.more("]"):
            out.append(self.value(f"{path}[{len(out)}]", depth + 1))
        return out

    def more(self, end: str) -> bool:
        """Step over commas; false, and behind the bracket, where it ends."""
        self.skip()
        while self.peek() == ",":
            self.at += 1
            self.skip()
        if not self.peek():
            raise self.error(f"{end!r} is missing at the end of the file")
        if self.peek() != end:
            return True
        self.at += 1
        return False

    def key(self) -> str:
        if self.peek() in ('"', "'"):
            return self.quoted(self.peek())
        found = _BARE_KEY.match(self.text, self.at)
        if found is None:
            raise self.error(f"{self.peek()!r} is no key")
        self.at = found.end()
        return found[0]

    def quoted(self, quote: str) -> str:
        if self.text.startswith("'''", self.at):
            end = self.text.find("'''", self.at + 3)
            if end < 0:
                raise self.error("text in ''' is not closed")
            text, self.at = self.text[self.at + 3 : end].strip("\n"), end + 3
            return text
        out, i = [], self.at + 1
        while i < len(self.text) and self.text[i] not in (quote, "\n"):
            if self.text[i] == "\\":
                piece, i = self.escape(i + 1)
                out.append(piece)
            else:
                out.append(self.text[i])
                i += 1
        if i >= len(self.text) or self.text[i] == "\n":
            raise self.error("a quote is not closed")
        self.at = i + 1
        return _paired("".join(out))

    def escape(self, i: int) -> tuple[str, int]:
        letter = self.text[i : i + 1]
        if letter == "u":
            digits = self.text[i + 1 : i + 5]
            if re.fullmatch(r"[0-9a-fA-F]{4}", digits):
                return chr(int(digits, 16)), i + 5
        if letter not in _ESCAPES:
            raise self.error(f"'\\{letter}' is no escape")
        return _ESCAPES[letter], i + 1

    def word(self) -> Any:
        """A number, a literal, or text up to the end of the line, less a comma and closing brackets at its end."""
        line_end = self.text.find("\n", self.at)
        line = self.text[self.at : line_end if line_end >= 0 else len(self.text)]
        short = (re.match(r"[^,\]}#\s]*", line) or [""])[0]
        value = _literal(short)
        if not isinstance(value, Bare):
            self.at += len(short)
            return value
        text = re.match(r"(?:(?!\s//|\s#|\s/\*)[^,\]}])*(?:\}(?=[^\s,\]}]))?", line)
        if line.startswith(("${", "{{")):  # a placeholder with braces of its own
            text = re.match(r"\$?\{+[^}]*\}+", line)
        found = text[0].strip() if text else ""
        if not found:
            raise self.error(
                "a value is missing" if not self.peek() or self.peek() in ",]}\n" else f"{self.peek()!r} is no value"
            )
        self.at += len(text[0]) if text else 0
        return Bare(found)


def _paired(text: str) -> str:
    """Two escapes \\uD8xx\\uDCxx are one character."""
    if any("\ud800" <= c <= "\udbff" for c in text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


def _literal(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        digits = text.lstrip("+-")
        return int(text) if digits.isdigit() and len(digits) < 400 else float(text)
    return Bare(text)
