"""Whether a W&B key is configured, without ever asking for one, and the mode that follows."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlparse

CLOUD = "https://api.wandb.ai"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def has_key() -> bool:
    """A key in the environment, or in netrc for the host in use (WANDB_BASE_URL)."""
    if any(os.environ.get(name) for name in KEYS):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", CLOUD)).hostname
    given = os.environ.get("NETRC")
    paths = [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(host in _hosts(path) for path in paths)


def _hosts(path: Path) -> set[str]:
    try:
        return set(netrc.netrc(path).hosts)
    except (OSError, netrc.NetrcParseError):
        return set()


def effective_mode(asked: str) -> tuple[str, str]:
    """(mode in effect, reason where it is not the one asked for)."""
    if asked == "auto":
        given = os.environ.get("WANDB_MODE")
        if given in ("offline", "online", "disabled"):
            mode, reason = given, "WANDB_MODE says so"
        else:
            return ("online", "a key is configured") if has_key() else ("offline", "no key is configured")
    else:
        mode, reason = asked, ""
    if mode == "online" and not has_key():
        return "offline", "no key is configured: set WANDB_API_KEY, or run `wandb login`"
    return mode, reason
