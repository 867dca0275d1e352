"""How much one caller, and all of them together, may ask for. Pure: time is a parameter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

HEALTH_CHECK = "/Recover/HealthCheck"
PROBE = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True, slots=True)
class Limits:
    """The reference's."""

    connections: int = 1024
    connections_of_source: int = 512
    """From one address."""
    streams: int = 64
    """Calls at the same time on one connection. More are kept waiting by the client's own gRPC."""
    receive: int = 4 << 20
    send: int = 8 << 20
    health_checks: int = 10_000
    """A second, and at once."""
    calls: int = 1000
    """A second, and at once: of all other methods with one answer together."""


class Bucket:
    """`rate` tokens a second, `burst` at most."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens = burst
        self._then: float | None = None

    def _fill(self, now: float) -> None:
        if self._then is not None and now > self._then:
            self._tokens = min(self._burst, self._tokens + (now - self._then) * self._rate)
        if self._then is None or now > self._then:
            self._then = now

    def take(self, now: float) -> bool:
        return self.reserve(now, 0.0) is not None

    def reserve(self, now: float, longest: float) -> float | None:
        """Seconds until the token that is now reserved is there; None, and none is, if that would be too long."""
        self._fill(now)
        wait = max(0.0, (1 - self._tokens) / self._rate)
        if wait > longest + 1e-9:
            return None
        self._tokens -= 1
        return wait


class Rates:
    """Of methods with one answer. Streams are not limited here."""

    def __init__(self, limits: Limits) -> None:
        self._calls = Bucket(limits.calls, limits.calls)
        self._own = {method: Bucket(limits.health_checks, limits.health_checks) for method in (HEALTH_CHECK, PROBE)}

    def admits(self, method: str, now: float) -> bool:
        return self._own.get(method, self._calls).take(now)


def exceeded(method: str) -> str:
    return f"qps exceeded, method={method}"


class Connections:
    """How many there are, and from where."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of_source: Counter[str] = Counter()
        self.total = 0

    def enter(self, source: str) -> str:
        """Empty if it may stay, else why not."""
        if self.total >= self._limits.connections:
            return f"there are {self.total} connections already"
        if self._of_source[source] >= self._limits.connections_of_source:
            return f"it has {self._of_source[source]} connections already"
        self.total += 1
        self._of_source[source] += 1
        return ""

    def leave(self, source: str) -> None:
        self.total -= 1
        self._of_source[source] -= 1
        if not self._of_source[source]:
            del self._of_source[source]
