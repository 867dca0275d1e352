"""This process's link to the controller, opened at its first use and shared by all that need it.

A script may talk to its peers before it builds its `Training`; both use the one link that a rank has.
"""

from __future__ import annotations

import json
import os

from evertrain.mindio import tls
from evertrain.mindio.board import BOARD_FD, Board
from evertrain.mindio.processor import Processor
from evertrain.mindio.protocol import Welcome
from evertrain.mindio.timing import Timing
from evertrain.torch.errors import UsageError

NO_DDP = "give Training the bare module, not DistributedDataParallel: training.model does the data parallelism"

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
        _opened = processor, processor.connect(timeout=timing().start)
    return _opened


def prepare_script() -> None:
    """The script has imported `Training`: its own `init_process_group` must not wait for peers that train already."""
    global _undo_patch
    if _undo_patch is None and is_launched():
        import torch

        from evertrain.torch.prelude import patch_init_process_group

        torch.nn.parallel.DistributedDataParallel.__init__ = _refuse_ddp
        _undo_patch = patch_init_process_group(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            connect=lambda: open_link()[0],
            first=incarnation() == 0,
            timeout=timing().group,
        )


def _refuse_ddp(*_: object, **__: object) -> None:
    # It would ask the group of before training for a backend that it doesn't have, and say so in riddles.
    raise UsageError(NO_DDP)
