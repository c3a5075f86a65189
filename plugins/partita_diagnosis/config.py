"""Config node `diagnosis`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DiagnosisConfig:
    """What is watched, and how closely. Findings go to diagnosis.jsonl in the run's folder and to the log."""

    # false: nothing is watched, nothing is wrapped
    enabled: bool = False
    # seconds without any progress of any rank after which the run counts as hanging
    hang_after: float = 20.0
    # on a hang: report, or stop (the missing rank is killed, so that the run ends or, with launch.restarts, goes on without it)
    on_hang: str = "report"
    # a rank whose own work takes this many times the median of the others' is named
    straggler_factor: float = 2.0
    # robust z-score (Iglewicz and Hoaglin 1993: 0.6745 |x - median| / MAD) above which a loss counts as a spike; 0: off
    spike: float = 12.0
    # warn; skip (the update is left out); roll_back (to the newest checkpoint, from where training goes on with other samples); or stop
    on_spike: str = "warn"
    # roll_back: updates after the spike whose samples are passed over too (PaLM, section 5.1: 200 to 500 batches in all)
    roll_back_skip: int = 0
    # roll_back: times, in one start of the run; a spike after them stops it
    roll_backs: int = 3
    # steps between comparisons of the replicas' weights; 0: never
    replicas_every: int = 10
    # steps between double computations of a micro-batch's loss, which must agree to the bit; 0: never
    recompute_every: int = 0
    # seconds after which a save that is still written is reported
    slow_save: float = 10.0
    # read each new checkpoint once against its checksums, and every so many seconds again the one read longest ago; 0: never
    verify_every: float = 0.0
    # share of the host's memory that must stay free; below it the run saves and leaves before the system kills it
    host_reserve: float = 0.02
