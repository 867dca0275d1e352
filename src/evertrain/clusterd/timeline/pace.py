"""How fast something may be done: so many times a second, and some at once after a quiet time. Pure."""

from __future__ import annotations


class Pace:
    def __init__(self, rate: float, burst: int) -> None:
        self._each, self._allowance = 1.0 / rate, (burst - 1) / rate
        self._next = float("-inf")

    def reserve(self, now: float) -> float:
        """Takes the next turn. Seconds until it comes."""
        turn = max(self._next, now - self._allowance)
        self._next = turn + self._each
        return max(0.0, turn - now)
