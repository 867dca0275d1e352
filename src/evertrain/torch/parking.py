"""How a spare that doesn't know its rank yet waits for it: announced, or in the middle of the user's script.

A spare and its agent share a socket and speak JSON lines. The spare says `{"ready": true}` and reads. A line
`{"env": {...}, "argv": [...]}` promotes it: these variables (null removes one) make it a rank. Descriptors that come
with the line take the place of those that it names in `"outputs": [1, 2]`. The end of the stream dismisses it.

A *parked* spare has already run the script when that line comes, up to the point where the script first asks which
rank it is. `os.environ` is watched for that: a read of RANK or its like says
`{"ready": true, "parked": "train.py:12 reads RANK"}`, waits for the promotion and then gives the true value, so the
script can't tell the difference. Reading any other variable waits for nothing. Copying the whole environment, or
starting another process, waits too: the copy would carry the rank that this process doesn't have yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from evertrain.mindio import board, title
from evertrain.torch import boot

RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_RESTART_COUNT",
        "EVERTRAIN_INCARNATION",
        board.BOARD_FD,
    }
)
"""What tells one rank from another, or one incarnation from the next."""

_STARTS_A_PROCESS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system"})
_OWN_FILES = frozenset({__file__, os.__file__, "<frozen os>", "<frozen _collections_abc>"})

_parked: Link | None = None
"""The link of this process while its script runs without a rank."""
_lock = threading.RLock()
_promoting = False
"""Only changed and looked at under the lock, so only the promoting thread itself can find it true."""


class Link:
    """The spare's end of the socket."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._received = b""
        self.announced = False

    def tell(self, **message: Any) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            _dismissed()

    def wait_for_promotion(self) -> list[str]:
        """Wait, take on the rank's environment, close the socket; returns the command line to run."""
        outputs: list[int] = []
        while not self._received.endswith(b"\n"):
            try:
                chunk, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 2)
            except ConnectionError:
                chunk, descriptors = b"", []
            outputs += descriptors
            if not chunk:
                _dismissed()
            self._received += chunk
        order = json.loads(self._received)
        self.close()
        for mine, theirs in zip(order.get("outputs", []), outputs, strict=True):
            os.dup2(theirs, mine)
            os.close(theirs)
        for name, value in order["env"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        title.show_rank(os.environ.get("RANK", ""))
        boot.mark_boot()
        return order.get("argv", [])

    def close(self) -> None:
        self._socket.close()


def _dismissed() -> NoReturn:
    # Nobody needs this process. Finalizing torch would only take time; what the script printed must not get lost.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)


# --- parking ---------------------------------------------------------------------------------------------------------


def park(link: Link) -> None:
    """From now on, whoever asks for the rank waits for the promotion."""
    global _parked
    _parked = link
    os.environ.__class__ = _WatchedEnviron
    os.environb.__class__ = _WatchedEnviron
    sys.addaudithook(_on_audit)


def is_parked() -> bool:
    return _parked is not None


def wait_for_rank(why: str = "waits for its rank") -> None:
    """Return once this process knows its rank; at once if it was never parked."""
    global _promoting
    if _parked is None:
        return
    with _lock:
        # Another thread may have been first, and the promotion itself sets the watched variables.
        if _parked is None or _promoting:
            return
        _promoting = True
        try:
            if not _parked.announced:
                _parked.tell(ready=True, parked=f"{_asker()} {why}")
                _parked.announced = True
            _parked.wait_for_promotion()
            _unwatch()
        finally:
            _promoting = False


def leave() -> Link | None:
    """Stop watching; the link, if the script ended without ever asking for its rank."""
    with _lock:
        link = _parked
        _unwatch()
        return link


def _unwatch() -> None:
    global _parked
    _parked = None
    os.environ.__class__ = os.environb.__class__ = os._Environ


def _asker() -> str:
    """The innermost place outside of the standard library's environment code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class _WatchedEnviron(os._Environ):
    """`os.environ` of a parked process. Everything that mappings offer comes down to these methods.

    No super(): the object has become a plain `os._Environ` again when the wait is over.
    """

    def __getitem__(self, key: Any) -> Any:
        _waits_if_rank(key, "reads")
        return os._Environ.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        # Otherwise the promotion would overwrite what the script meant to be the last word.
        _waits_if_rank(key, "sets")
        os._Environ.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        _waits_if_rank(key, "deletes")
        os._Environ.__delitem__(self, key)

    def __iter__(self) -> Iterator:
        wait_for_rank("reads the whole environment")
        return os._Environ.__iter__(self)

    def __len__(self) -> int:
        wait_for_rank("reads the whole environment")
        return os._Environ.__len__(self)

    def __repr__(self) -> str:
        wait_for_rank("reads the whole environment")
        return os._Environ.__repr__(self)


def _waits_if_rank(key: Any, verb: str) -> None:
    name = os.fsdecode(key) if isinstance(key, bytes) else key
    if name in RANK_VARIABLES:
        wait_for_rank(f"{verb} {name}")


def _on_audit(event: str, arguments: tuple) -> None:
    # Audit hooks can't be removed: this stays for the life of the process and must cost next to nothing.
    if _parked is not None and event in _STARTS_A_PROCESS:
        wait_for_rank("starts a process")
