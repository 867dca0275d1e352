"""What the fault centre finds. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evertrain.clusterd.model import JobFaults
from evertrain.wire.faultinfo import DeviceInfo, NodeInfo, SwitchInfo


@dataclass(frozen=True, slots=True)
class Isolation:
    """What of a node is not for new pods."""

    node: str = ""
    """Why the node as a whole is not; empty: it is."""
    chips: Mapping[str, str] = field(default_factory=dict)
    """The worst level of each, by name of the chip; NormalNPU if its node doesn't say what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Result:
    """`jobs`, `devices`, `switches`, `nodes` and `isolated` are the centre's own, and change with the next one."""

    jobs: Mapping[str, JobFaults]
    """Of those that have any."""
    changed: Mapping[str, JobFaults]
    """Those that are others than before, also those that have none any more, or are gone."""
    devices: Mapping[str, DeviceInfo]
    """By node, as schedulers shall see them; so the next two."""
    switches: Mapping[str, SwitchInfo]
    nodes: Mapping[str, NodeInfo]
    news: frozenset[str]
    """The nodes of which any of that is another than before."""
    isolated: Mapping[str, Isolation]
    """By node."""
    labels: Mapping[str, str]
    """`fault-type` (Separate or SubHealth) by uid of pods that related faults have hit."""
    manual: Mapping[str, str]
    """What clusterd-manual-info-cm shall hold; empty: it shall not be."""
    statistics: Mapping[str, str]
    """What statistic-fault-info shall hold."""
    complaints: tuple[str, ...]
    """About input that can't be used, since the last one."""
    next_ms: int | None
    """When something changes by time alone."""
