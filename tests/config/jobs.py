"""A Hydra application for the tests: its job writes what it was given, and fails where it is told to."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from partita.config.compose import hydra_main
from partita.config.job import JobInfo
from partita.config.plain import to_plain


def job(config: Any, info: JobInfo) -> dict[str, Any]:
    """Count the calls, keep the config. FAIL_LR names a learning rate that is a failure."""
    if os.environ.get("FAIL_LR") and config.optimizer.lr == float(os.environ["FAIL_LR"]):
        raise RuntimeError("boom in the job")
    line = {
        "config": to_plain(config),
        "number": info.number,
        "dir": str(info.dir),
        "sweep": info.sweep_name,
        "choices": dict(info.choices),
    }
    with (info.dir / "seen.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")
    return {"status": "done", "loss": config.optimizer.lr * 2, "steps": config.train.steps}


if __name__ == "__main__":
    sys.exit(hydra_main(job, app="test"))
