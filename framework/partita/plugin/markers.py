"""What a plug-in imports to mark its hooks. No heavy imports, no cycles."""

from __future__ import annotations

import pluggy

PROJECT = "partita"
API = 1  # a plug-in states `partita_api = 1`; raised when a hook changes so that old plug-ins can't work

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
