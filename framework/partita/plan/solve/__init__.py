"""The planner: fills in what the config leaves on `auto`, by comparing the plans that it can become."""

from partita.plan.solve.choose import Choice, choose

__all__ = ["Choice", "choose"]
