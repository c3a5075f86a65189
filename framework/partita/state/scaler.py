"""Loss scaling for float16 (Micikevicius et al. 2018, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch

from partita.plan.plan import LossScale


class LossScaler:
    """Multiplies the loss so that small gradients stay representable; without a config the scale is 1 and never moves."""

    def __init__(self, config: LossScale | None) -> None:
        self._config = config
        self.value = config.initial if config else 1.0
        self.used = self.value  # scale of the gradients at hand
        self.good = 0  # finite updates since the scale last moved
        self.tolerated = 0  # overflows in a row
        self.skipped = 0

    @property
    def skips(self) -> bool:
        """Whether an overflow is part of the method rather than a fault."""
        return self._config is not None and self._config.dynamic

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate."""
        return loss * self.value if self._config else loss

    def update(self, finite: bool) -> None:
        """Move the scale after an update whose gradients were finite, or not."""
        self.used = self.value
        if not finite:
            self.skipped += 1
        if self._config is None or not self._config.dynamic:
            return
        if finite:
            self.good, self.tolerated = self.good + 1, 0
            if self.good == self._config.interval:
                self.value, self.good = self.value * self._config.factor, 0
            return
        self.good, self.tolerated = 0, self.tolerated + 1
        if self.tolerated >= self._config.hysteresis:
            self.value, self.tolerated = max(self.value / self._config.factor, self._config.minimum), 0

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"value": self.value, "good": self.good, "tolerated": self.tolerated, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""
        self.value, self.good = float(state["value"]), int(state["good"])
        self.tolerated, self.skipped = int(state["tolerated"]), int(state["skipped"])
        self.used = self.value
