"""Jobs that would listen on the same port, where all pods share the network of this machine. Pure.

A program that listens on all addresses, as torch's store does, has its port on the whole machine. A second job with
that container port would die of EADDRINUSE; it waits instead until the first has ended. A job keeps its ports while
pods of it are being replaced, so that nobody takes them in the moment in which it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evertrain.embedded.scheduler.views import PodView

Ports = frozenset[int]
NONE: Ports = frozenset()
WHAT_TO_DO = (
    "to run both at once, give one of them another port, or start the cluster with --own-network, which says what is "
    "missing where that can't be"
)


@dataclass(frozen=True)
class Claim:
    party: str
    who: str
    """A pod, or a pod group that is about to get its pods back."""


class SharedPorts:
    """Who has which port. Whoever gets a place later is added with `take`."""

    def __init__(self, pods: Iterable[PodView], expecting: Iterable[str], remembered: Mapping[str, Ports]) -> None:
        """`expecting`: parties whose pods are still to come, or to come again; `remembered`: which ports they had."""
        self._claims: dict[int, Claim] = {}
        present = {pod.party for pod in pods if pod.holds}
        for pod in sorted(pods, key=lambda pod: not pod.holds):
            if pod.party in present and not pod.finished:
                self.take(pod)
        for party in sorted(present | set(expecting)):
            for port in remembered.get(party, NONE):
                self._claims.setdefault(port, Claim(party, f"pod group {party}"))

    def take(self, pod: PodView) -> None:
        for port in pod.ports:
            self._claims.setdefault(port, Claim(pod.party, f"pod {pod.key}"))

    def clash(self, pods: Iterable[PodView]) -> str:
        """Why these pods of one party have to wait; empty if they don't."""
        for pod in pods:
            for port in sorted(pod.ports):
                claim = self._claims.get(port)
                if claim is not None and claim.party != pod.party:
                    return (
                        f"port {port} is that of {claim.who} of another job, and all pods share the network of this "
                        f"machine. It waits for that job's end; {WHAT_TO_DO}"
                    )
        return ""


def remember(pods: Iterable[PodView], before: Mapping[str, Ports], parties: Iterable[str]) -> dict[str, Ports]:
    """The ports of each of these parties, also of pods that it had before."""
    found = {party: before.get(party, NONE) for party in parties}
    for pod in pods:
        if pod.party in found:
            found[pod.party] |= pod.ports
    return {party: ports for party, ports in found.items() if ports}
