"""What the cluster says in mounted files about chips that it resets and pods that it replaces.

The older way of telling a launcher, beside TaskNet. `reset.json` lists ranks with a status:

    fault          the rank's chip or process has failed; its pod is replaced, or the process restarted
    unrecovered    the chip is being reset: no process may use it
    recovered      the chip works again

and counts in `RetryTime` how often pods were replaced. `restartType` says by which of both a fault is dealt with, and
`version` is the number of the rank table, which grows when a new pod is in it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evertrain.taskd import environment, files

FAULT, UNRECOVERED, RECOVERED = "fault", "unrecovered", "recovered"
HOT_RESET, POD_RESCHEDULE = "hotReset", "podReschedule"
NO_VERSION = -1


class RankStatus(msgspec.Struct, frozen=True, rename={"rank": "RankId", "status": "Status"}):
    rank: int
    status: str = ""


class Reset(
    msgspec.Struct,
    frozen=True,
    rename={
        "rank_list": "RankList",
        "retry_time": "RetryTime",
        "graceful_exit": "GracefulExit",
        "flushing": "FaultFlushing",
        "restart_processes": "RestartFaultProcess",
        "update_time": "UpdateTime",
    },
):
    """reset.json."""

    rank_list: list[RankStatus] | None = None
    retry_time: int = 0
    graceful_exit: int = 0
    flushing: bool = False
    """Faults are being collected: nobody may start."""
    restart_processes: bool = False
    """A faulty process is restarted in its pod."""
    update_time: int = 0

    @property
    def statuses(self) -> dict[int, str]:
        return {each.rank: each.status for each in self.rank_list or ()}

    def faulty(self, ranks: Collection[int]) -> set[int]:
        """Those of the ranks that are listed as faulty."""
        return {rank for rank, status in self.statuses.items() if status == FAULT and rank in ranks}

    @property
    def recovered(self) -> bool:
        """Nothing is listed but ranks that work again."""
        return all(status == RECOVERED for status in self.statuses.values())


EMPTY = Reset()


def parse(text: str) -> Reset | None:
    """None if it is no such file, or only a part of one."""
    try:
        return msgspec.json.decode(text, type=Reset, strict=False)
    except (msgspec.DecodeError, UnicodeError):
        return None


@dataclass(frozen=True)
class FaultStatus:
    """What is new in reset.json."""

    is_fault: bool = False
    """Ranks of this node are faulty."""
    is_unrecovered: bool = False
    """Chips somewhere are being reset, or have been."""
    is_retried: bool = False
    """Pods were replaced."""
    restart_fault_process: bool = False


def fault_status(now: Reset, before: Reset, local_ranks: Collection[int]) -> FaultStatus:
    """Against `before`, the file as of the last time that something was done about it."""
    known = before.statuses
    changed = any(
        status in (UNRECOVERED, RECOVERED) and known.get(rank) != status for rank, status in now.statuses.items()
    )
    return FaultStatus(
        is_fault=bool(now.faulty(local_ranks) - before.faulty(local_ranks)),
        is_unrecovered=changed,
        is_retried=now.retry_time > before.retry_time,
        restart_fault_process=now.restart_processes,
    )


def may_start(reset: Reset, local_ranks: Collection[int]) -> bool:
    return not reset.flushing and not reset.faulty(local_ranks)


@dataclass(frozen=True)
class ResetFiles:
    folder: Path
    rank_table: Path

    @classmethod
    def mounted(cls) -> ResetFiles:
        return cls(environment.reset_folder(), environment.rank_table_folder())

    def reset(self) -> Reset | None:
        """Empty if there is no such file or it is not to be trusted; None if it is just being written."""
        try:
            text = files.read_text(self.folder / "reset.json")
        except OSError:
            return EMPTY
        return parse(text)

    def restart_type(self) -> str:
        return files.text_or_empty(self.folder / "restartType").strip()

    def version(self) -> int:
        text = files.text_or_empty(self.rank_table / "version").strip()
        return int(text) if text.isascii() and text.isdigit() else NO_VERSION
