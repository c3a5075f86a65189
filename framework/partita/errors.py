"""Errors that a user meets. Each says what, where it came from, the numbers, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class PartitaError(Exception):
    """Base of all errors raised for a user. `exit_status` is what the command line returns."""

    exit_status = EXIT_FAILED


class ConfigError(PartitaError):
    """The config can't be used. Carries the whole text to print; costs one screen and exit status 2."""

    exit_status = EXIT_CONFIG


class PluginError(PartitaError):
    """A plug-in can't be loaded, or two of them want the same thing."""

    exit_status = EXIT_CONFIG


class CheckpointError(PartitaError):
    """A checkpoint can't be written or read; nothing that was complete has been lost."""


class NonFiniteError(PartitaError):
    """The gradient norm of an update is not finite, on all ranks alike; the update was not applied."""


class RollBack(PartitaError):
    """Raised by an observer on all ranks alike: the run goes back to its newest checkpoint and passes over some samples.

    skip: updates whose samples are passed over after the one that the run had come to.
    """

    def __init__(self, message: str, skip: int = 0) -> None:
        super().__init__(message)
        self.skip = skip


class RunInterrupted(PartitaError):
    """A signal ended the run after a checkpoint; `signum` tells which. to_grow: it was stopped only to go on with more ranks."""

    def __init__(self, signum: int, message: str, to_grow: bool = False) -> None:
        super().__init__(message)
        self.signum, self.to_grow = signum, to_grow
        self.exit_status = 128 + signum


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to `name`, best first; empty when none is near."""
    return difflib.get_close_matches(name, sorted(set(known)), n=count, cutoff=0.55)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause for the end of an error: the nearest names, else all of them (at most 12)."""
    options = sorted(set(known))
    near = nearest(name, options)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    if not options:
        return "nothing is available here."
    more = f" and {len(options) - 12} more" if len(options) > 12 else ""
    return "available: " + ", ".join(options[:12]) + more + "."
