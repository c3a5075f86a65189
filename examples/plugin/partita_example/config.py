"""Config node `example`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ExampleConfig:
    """What this plug-in does to a run; by default nothing."""

    # logits are kept within -cap to cap by cap * tanh(logits / cap); 0: left as they are (Gemma 2: 30; its report, section 2)
    cap: float = 0.0
    # steps between lines of example.jsonl in the run's folder; 0: no such file
    report_every: int = 0
