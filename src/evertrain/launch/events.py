"""The events file: one JSON object a line, written as things happen."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from typing import Any

from evertrain import __version__
from evertrain.launch.config import LaunchConfig
from evertrain.launch.output import Outputs


class EventsFile:
    """Appends, so that a job that is started again in the same place keeps its history. A run begins with `launch`.

    On several nodes the node of the controller in charge writes; nodes may share the file.
    """

    def __init__(self, config: LaunchConfig, outputs: Outputs) -> None:
        self._config = config
        self._outputs = outputs
        self._fd: int | None = None
        self.active = config.node_rank == 0 or config.events_everywhere
        self.continues = False
        """The controller here has taken over from another one, in the middle of a run."""
        if config.nnodes == 1:
            self._open()

    def _open(self) -> bool:
        config = self._config
        if self._fd is None and config.events:
            self._fd = os.open(config.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if not self.continues or os.fstat(self._fd).st_size == 0:
                self.tell(
                    "launch",
                    version=__version__,
                    run=config.run_id,
                    script=config.script,
                    world_size=config.world_size,
                    bound=config.timing.bound,
                    faults=[str(fault) for fault in config.faults],
                )
        return self._fd is not None

    def tell(self, event: str, **fields: Any) -> None:
        """An event of the launcher's own."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.write({"event": event, **fields, "at": at, "t": time.monotonic()})

    def write(self, record: dict[str, Any]) -> None:
        if self.active and self._open():
            assert self._fd is not None
            line = json.dumps(record, separators=(",", ":"), default=str) + "\n"
            self._outputs.files.write(self._fd, line.encode())

    def close(self) -> None:
        """After the outputs have been closed, whose thread does the writing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
