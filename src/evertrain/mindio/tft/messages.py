"""What a controller and its processors say to each other in the callback interface.

Frames are those of `evertrain.mindio.framing`: a length and a msgpack array `[serial, message]`, typed and validated,
nothing ever unpickled. A link opens with `Hello`, which the controller answers by `Welcome` or `Refused`.

Every order carries `sn`, the serial number of the controller's action. A processor carries an order out if its number
is above the last one, sends the stored answer again if it is the same, and drops it if it is older. Orders that expect
an answer get exactly one `Reply` with the same number.
"""

from __future__ import annotations

import msgspec

from evertrain.mindio.tft.numbers import ControllerRepairType

VERSION = 1


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of everything on the wire; the class name is the tag."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is like. The three states are `TrainState`s, `data_status` is a `DataStatus`."""

    step: int = 0
    """Last finished update."""
    run_status: int = 0
    npu_status: int = 0
    data_status: int = 0
    """The target of a repair is UPDATING from its begin until it has succeeded: half of it is no state."""
    backup_step: int = -1
    error_code: str = ""
    error: str = ""
    """The exception by which the training function was left, in a line, if it is none that is known."""
    parked: bool = False
    """The training thread is out of the training function and waits for the end of a recovery. This is how a standby
    that takes over learns which recovery was under way."""


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of optimizer state is kept over a data-parallel group."""

    rank_list: list[int]
    replica_cnt: int
    replica_shift: int = 0


# --- opening a link --------------------------------------------------------------------------------------------------


class Hello(Message):
    version: int
    rank: int
    token: str = ""
    world_size: int = 0
    ip: str = ""
    """Address by which peers could reach this process, if it became the controller."""
    process: str = ""
    """Tells this process from others that have been or will be the same rank."""


class Welcome(Message):
    """The controller is active and takes this processor's registration."""

    instance: str = ""
    """Names this controller among all that ever led the job. Another name: serial numbers begin anew."""
    heartbeat: float = 1.0
    """How often a processor that has nothing to say shows that it lives; less often in a big job."""
    patience: float = 0.0
    """A controller that says nothing for this long is frozen or gone: look for another one. 0: wait for ever."""


class Refused(Message):
    reason: str
    passive: bool = False
    """A standby that has not taken over yet: try again."""


# --- processor to controller -----------------------------------------------------------------------------------------


class Register(Message):
    status: Status = Status()
    """At a first registration nothing has happened yet; after a take-over this is how the new controller learns where
    the job is."""
    repair_id: int = 0
    replaces: bool = False
    """True for a process that has not registered anywhere before."""


class InitReport(Message):
    """Sent once the optimizer's replica groups are known."""

    groups: list[ReplicaGroup]
    enable_arf: bool = False
    enable_uce: bool = True
    enable_zit: bool = False


class DpReport(Message):
    ranks: list[int]


class Heartbeat(Message):
    status: Status
    repair_id: int = 0


class Reply(Message):
    sn: int
    result: int
    status: Status
    load_step: int = 0
    """Step of the checkpoint that was loaded instead of a repair; 0 if none was."""
    detail: str = ""


class StandbyUp(Message):
    """A passive controller was started in this process, as `Standbys` had asked, and listens here."""

    ip: str
    port: int


class Leaving(Message):
    """The controller has said nothing for too long; this processor looks for another one. A controller that comes to
    life again learns from it that others have not died, and may be led by a standby."""


class Bye(Message):
    """The training function returned; this processor leaves and is not missed."""


# --- controller to processor -----------------------------------------------------------------------------------------


class Registered(Message):
    result: int
    """OK, REPAIR (this process replaces a faulty one), ERROR (not wanted now), STOP_SERVICE (another one is this rank)
    or WAIT_CHECK (rank outside the world)."""
    repair_id: int = 0
    hot_switch: bool = False


class Standbys(Message):
    """Where to go when this controller is lost, in this order.

    The rank named with port 0 is asked to start a passive controller on a free port and answers `StandbyUp`; after
    that the list goes out again with the port. A rank named with a port and no controller yet starts one on that port.
    """

    sn: int
    addresses: list[tuple[int, str, int]]
    """(rank that hosts it, ip, port)."""
    epoch: int = 0
    """Of the controller that sends this. The standby at place i (from 0) of the list is given epoch + i + 1: its serial
    numbers and repair ids begin above all that went before."""


class Collect(Message):
    sn: int


class Prelock(Message):
    sn: int
    step: int
    limit: float
    """Seconds after which a rank that has not come to the step answers TIMEOUT."""


class Pause(Message):
    """Halt at the end of this step. A rank that has gone past it answers NEED_RETRY; one that halts at an earlier step
    goes on to this one."""

    sn: int
    step: int


class Continue(Message):
    """End a pause."""

    sn: int
    leave: bool = False
    """By leaving the training function with "STEP FINISH": processes are about to be exchanged."""
    unlock: bool = False
    """End a lock as well, unless the training function was left: nothing will follow it."""


class DeviceStop(Message):
    sn: int
    repair_type: int
    """A `ControllerRepairType`."""
    uce: bool = False
    """The platform knows of a fault of this rank's memory, whether or not its training has noticed."""


class DeviceClean(Message):
    sn: int
    repair_type: int


class RebuildGroup(Message):
    """`upgrade` picks the elastic callback; `param` is the platform's text for it."""

    sn: int
    repair_id: int
    fault_ranks: list[int]
    upgrade: bool = False
    param: str = ""


class RepairUnit(msgspec.Struct, frozen=True, kw_only=True):
    src: int
    dst: int
    kind: int
    repair_type: int
    """A `RepairType`; the same in all units of one message."""


class Repair(Message):
    sn: int
    repair_id: int
    step: int
    units: list[RepairUnit]
    rank_list: list[int]
    """All ranks that take part in this repair."""
    upgrade: bool = False
    param: str = ""
    repair_type: int = ControllerRepairType.NONE
    """As in `DeviceStop`, which a process that joins later has not seen."""


class Rollback(Message):
    sn: int
    repair_id: int
    step: int
    upgrade: bool = False
    param: str = ""
    repair_type: int = ControllerRepairType.NONE


class DowngradeRebuild(Message):
    sn: int
    repair_id: int
    world_ranks: list[int]
    groups: list[list[int]]
    """This rank's data-parallel group for each kind, without the isolated ranks."""
    param: str


class NotifyNormal(Message):
    sn: int


class SaveGroup(msgspec.Struct, frozen=True, kw_only=True):
    kind: int
    ranks: list[int]


class SaveCheckpoint(Message):
    sn: int
    repair_id: int
    step: int
    groups: list[SaveGroup]
    """For each kind, the ranks that save together with this one."""


class Rename(Message):
    sn: int
    step: int


class Exit(Message):
    """End the process. No answer."""

    sn: int


class Alive(Message):
    """The controller lives. Said to everybody now and then: a frozen one keeps its links. No answer."""


class Destroyed(Message):
    """The controller is gone for good: neither reconnect nor go elsewhere. No answer."""

    sn: int


AnyMessage = (
    Hello | Welcome | Refused
    | Register | InitReport | DpReport | Heartbeat | Reply | StandbyUp | Leaving | Bye
    | Registered | Standbys | Collect | Prelock | Pause | Continue | DeviceStop | DeviceClean
    | RebuildGroup | Repair | Rollback | DowngradeRebuild | NotifyNormal | SaveCheckpoint | Rename | Exit | Destroyed
    | Alive
)  # fmt: skip

Order = (
    Collect | Prelock | Pause | Continue | DeviceStop | DeviceClean
    | RebuildGroup | Repair | Rollback | DowngradeRebuild | NotifyNormal | SaveCheckpoint | Rename
)  # fmt: skip
"""What is answered by a `Reply`."""

decoder = msgspec.msgpack.Decoder(tuple[int, AnyMessage])
