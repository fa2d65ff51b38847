"""``Link``: what it takes to send something from one machine to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Between any two machines.

    Attributes:
        mbit_per_s: how fast bytes go. exchange_us: what an exchange of next to none takes after a stretch of
            computing, microseconds (:func:`torch_pi2.measure.link.measure_link` measures both).
    """

    mbit_per_s: float
    exchange_us: float

    def ms(self, nbytes: float, hops: float = 1) -> float:
        """Milliseconds of ``hops`` messages of ``nbytes``, one after another."""
        return hops * (self.exchange_us + 8 * nbytes / self.mbit_per_s) / 1e3
