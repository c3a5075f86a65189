"""Measured rates of machines: a small JSON file of the user's, written by scripts/calibrate.py and read where a plan is for this machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from partita.errors import ConfigError


@dataclass(frozen=True)
class Calibration:
    """What was measured on one kind of machine, SI units.

    flops: FLOP/s of large matrix products by dtype, of one device or of all cores. memory: bytes/s of elementwise work. overhead:
    seconds of a block's forward and backward pass at no size. intra, inter: (bytes/s, seconds) of links between `ranks` ranks; None
    where there was no such link. host: bytes/s from host to device. when: date and versions.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    overhead: float = 0.0
    intra: tuple[float, float] | None = None
    inter: tuple[float, float] | None = None
    host: float | None = None
    ranks: int = 1
    when: str = ""


def calibration_file(configured: str | None) -> Path | None:
    """The file: as configured, else partita/calibration.json in the user's cache folder. None for `none`: nothing is read."""
    if configured == "none":
        return None
    if configured and configured != "auto":
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "partita" / "calibration.json"


def machine_key(device: str, cores: int, count: int) -> str:
    """Machines of one key are taken to be alike: a cluster's nodes share one measurement."""
    return f"{device} x {count}, {cores} cores, {platform.machine()}"


def read_calibration(path: Path | None, key: str) -> Calibration | None:
    """The measurement of a machine, or None. Raises ConfigError for a file that is none of ours."""
    if path is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_text())["machines"].get(key)
        return None if found is None else _from_json(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "    -> run scripts/calibrate.py again, or set cluster.calibration=none"
        raise ConfigError(f"cluster.calibration: {path} is no calibration file: {error}\n{remedy}") from error


def write_calibration(path: Path, key: str, value: Calibration) -> None:
    """Add a measurement to the file, in place of an older one of the same key; complete or not at all."""
    known: dict[str, Any] = {"machines": {}}
    if path.exists():
        try:
            known = json.loads(path.read_text())
            known["machines"]
        except (ValueError, KeyError, TypeError):
            known = {"machines": {}}
    known["machines"][key] = asdict(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.partial")
    part.write_text(json.dumps(known, indent=1))
    os.replace(part, path)


def _from_json(values: Mapping[str, Any]) -> Calibration:
    pairs = {name: tuple(values[name]) if values.get(name) else None for name in ("intra", "inter")}
    return Calibration(**{**values, **pairs})
