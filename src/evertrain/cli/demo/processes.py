"""The processes of a pod as the machine sees them: a pod counts its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def find(pod: str, pid: int) -> int | None:
    """The id, outside of the pod, of the process that has `pid` in it. Only pods of the cluster in this process."""
    ours = os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            status = _status(folder)
            if status.get("NSpid", "").split()[-1:] != [str(pid)] or not _is_below(folder, ours):
                continue
            if f"HOSTNAME={pod}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    return None


def _status(folder: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def _is_below(folder: Path, ancestor: int) -> bool:
    while (parent := int(_status(folder)["PPid"])) > 1:
        if parent == ancestor:
            return True
        folder = folder.with_name(str(parent))
    return False
