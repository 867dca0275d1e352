"""This process's link to the controller, opened at its first use and shared by all that need it.

A script may talk to its peers before it builds its `Training`; both use the one link that a rank has.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from types import TracebackType

from evertrain.mindio import protocol, tls
from evertrain.mindio.board import BOARD_FD, Board
from evertrain.mindio.processor import LinkLost, Processor, Refused
from evertrain.mindio.protocol import Welcome
from evertrain.mindio.timing import Timing
from evertrain.torch.errors import UsageError, user_frames

NO_DDP = "give Training the bare module, not DistributedDataParallel: training.model does the data parallelism"

EXIT_TOLD = 75
"""Exit code of a rank that the controller told to leave; the launcher knows why and does not look at it."""

_opened: tuple[Processor, Welcome] | None = None
_board: Board | None = None
_undo_patch = None


def is_launched() -> bool:
    """True in a process that `evertrain launch` started."""
    return bool(os.environ.get("EVERTRAIN_CONTROLLER"))


def timing() -> Timing:
    return Timing(**json.loads(os.environ["EVERTRAIN_TIMING"]))


def incarnation() -> int:
    return int(os.environ.get("EVERTRAIN_INCARNATION", "0"))


def board() -> Board:
    """The agent's board for this process, or one that nobody reads."""
    global _board
    if _board is None:
        fd = os.environ.get(BOARD_FD)
        _board = Board(int(fd)) if fd else Board()
    return _board


def open_link() -> tuple[Processor, Welcome]:
    global _opened
    if _opened is None:
        parts = (text.rpartition(":") for text in os.environ["EVERTRAIN_CONTROLLER"].split(","))
        addresses = [(host, int(port)) for host, _, port in parts]
        certificates = tls.TlsInfo.from_environment(os.environ)
        processor = Processor(
            addresses,
            os.environ["EVERTRAIN_TOKEN"],
            rank=int(os.environ["RANK"]),
            incarnation=incarnation(),
            pid=os.getpid(),
            board=board(),
            tls=tls.client_context(certificates) if certificates else None,
            patience=timing().takeover if os.environ.get("EVERTRAIN_STANDBY") == "1" else 0.0,
        )
        _opened = processor, _connect(processor)
        _report_mistakes(*_opened)
    return _opened


def _connect(processor: Processor) -> Welcome:
    """A rank that nobody waits for any more says a line at most: its traceback would hide the job's own reason."""
    try:
        return processor.connect(timeout=timing().start)
    except (Refused, OSError) as error:
        if isinstance(error, Refused) and error.over:
            raise SystemExit(EXIT_TOLD) from None
        place = os.environ["EVERTRAIN_CONTROLLER"]
        raise SystemExit(f"evertrain: rank {os.environ['RANK']} has no controller ({place}): {error}") from None


def _report_mistakes(processor: Processor, welcome: Welcome) -> None:
    """A `UsageError` that would end the script before its training goes to the controller, which has the launcher say
    it once for all ranks. Where the controller has no answer, it is shown as any other exception."""
    if welcome.running:
        return  # a replacement that fails is tried again first: others have come past this place
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UsageError) and processor.starting:
            rank = int(os.environ["RANK"])
            detail, stack = str(error)[:2000], user_frames(error)
            fault = protocol.Fault(kind="script", rank=rank, detail=detail, stack=stack, at=time.monotonic())
            processor.send(protocol.Out(step=0, clean=False, fresh=True, fault=fault))
            if _told_to_leave(processor):
                return
        show(kind, error, trace)

    sys.excepthook = hook


def _told_to_leave(processor: Processor) -> bool:
    try:
        while not isinstance(processor.receive(timeout=timing().grace), protocol.Exit):
            pass
    except (LinkLost, queue.Empty):
        return False
    return True


def prepare_script() -> None:
    """The script has imported `Training`: its own `init_process_group` must not wait for peers that train already."""
    global _undo_patch
    if _undo_patch is None and not is_launched():
        from evertrain.torch import unprotected

        _undo_patch = unprotected.patch_init_process_group()
    elif _undo_patch is None:
        import torch

        from evertrain.torch.prelude import patch_init_process_group

        torch.nn.parallel.DistributedDataParallel.__init__ = _refuse_ddp
        _undo_patch = patch_init_process_group(
            place=lambda: (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])),
            connect=lambda: open_link()[0],
            first=lambda: incarnation() == 0,
            timeout=timing().group,
        )


def _refuse_ddp(*_: object, **__: object) -> None:
    # It would ask the group of before training for a backend that it doesn't have, and say so in riddles.
    raise UsageError(NO_DDP)
