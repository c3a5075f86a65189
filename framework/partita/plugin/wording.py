"""The one shape of this room's messages."""

from __future__ import annotations


def complaint(reason: str, remedy: str) -> str:
    """What is wrong, and on a second line what to do."""
    return f"{reason}\n    -> {remedy}"
