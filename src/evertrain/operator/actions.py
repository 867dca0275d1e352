"""What the operator sees of one job, and what it can do about it. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from evertrain.kube.port import Kind, Object


@dataclass(frozen=True)
class Observed:
    """One job and what belongs to it, as it is now."""

    job: Object
    now: datetime
    pods: tuple[Object, ...] = ()
    """Pods that carry the job's name in their label."""
    service: Object | None = None
    """The service by the name of the leader's."""
    pod_group: Object | None = None
    gang: bool = True
    has_groups: bool = True
    """The API server has PodGroups: Volcano is installed, or was."""
    queue_error: str = ""
    """Why the queue that the job names can't be used; empty if it can, or if nobody had to look."""
    clusterd: str = ""
    """The address of ClusterD's service; empty if there is none."""
    token: str = field(default="", repr=False)
    """What the job shows to ClusterD; empty if that wants nothing."""
    certificates: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Those that the job shows to ClusterD, by the names of their files; empty if that wants none."""
    retry_config: Object | None = None
    """Volcano's ConfigMap with the remaining retries, looked at only when pods have failed. None if it doesn't exist:
    then nobody but the operator restarts failed pods."""
    rank_config: Object | None = None
    """The ConfigMap for the rank table, if the user made one."""
    rank_file: tuple[str, str] | None = None
    """The content of the rank table's file and of the version beside it; None if it isn't wanted."""


@dataclass(frozen=True)
class WriteStatus:
    """Always the first action: what follows rests on it being written."""

    status: Object


@dataclass(frozen=True)
class Create:
    kind: Kind
    item: Object
    reason: str
    """The reason of the condition if it fails."""
    failure: str
    """The message then; {error} stands for what the API server said."""


@dataclass(frozen=True)
class Delete:
    kind: Kind
    name: str
    namespace: str
    uid: str
    why: str
    grace: int | None = None
    """Seconds; as the object says if None."""


@dataclass(frozen=True)
class Patch:
    kind: Kind
    name: str
    namespace: str
    patch: Object


@dataclass(frozen=True)
class WriteRankFile:
    table: str
    version: str


@dataclass(frozen=True)
class Emit:
    """An event on the job."""

    type: str
    reason: str
    message: str


Action = WriteStatus | Create | Delete | Patch | WriteRankFile | Emit


@dataclass
class Outcome:
    actions: list[Action] = field(default_factory=list)
    wake: datetime | None = None
    """Look again then, though nothing may have changed."""
