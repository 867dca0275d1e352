"""What a warm spare can become."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from evertrain.taskd.agent import spares


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (("python", "-u", "train.py", "--lr", "1"), ["--", "train.py", "--lr", "1"]),
        (("python", "-u", "-m", "package.train", "-m"), ["--module", "--", "package.train", "-m"]),
        (("./train", "--lr", "1"), None),
        (("numactl", "--cpunodebind=0", "python", "-u", "train.py"), None),
        (("python", "-u", "-c", "pass"), None),
        (("python", "-u", "-m"), None),
        (("python",), None),
        ((), None),
    ],
)
def test_only_what_torchrun_starts_python_for(command: tuple[str, ...], argv: list[str] | None) -> None:
    assert spares._argv(command) == argv


class Hasty(socket.socket):
    """The link to a spare that reads what comes, and closes the link, before the agent does anything more."""

    peer: socket.socket
    heard = b""

    def sendmsg(self, buffers: Sequence[bytes], ancillary: Any = ()) -> int:  # type: ignore[override]
        sent = super().sendmsg(buffers, ancillary)
        self.heard = self.peer.recv(65536)
        self.peer.close()
        return sent


def test_a_spare_may_have_become_a_process_before_the_agent_looks_again() -> None:
    ours, theirs = socket.socketpair()
    spare = object.__new__(spares.Spare)
    spare.link = link = Hasty(fileno=ours.detach())
    link.peer, spare.environment = theirs, {"OLD": "1"}
    spare.become(["--", "train.py"], {"RANK": "3"}, {})
    assert json.loads(link.heard) == {"env": {"OLD": None, "RANK": "3"}, "argv": ["--", "train.py"], "outputs": []}


def test_what_never_becomes_ready_is_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "PROGRAM", "no.such.module")
    started: list[int] = []
    with selectors.DefaultSelector() as selector:
        ready = spares.Spares(1, "", selector, started.extend)
        ready.replenish((sys.executable, "-u", "train.py"), os.environ)
        while selector.get_map():
            for key, _ in selector.select(60):
                ready.hear(key.fd)
        assert len(started) == spares._MAX_FAILURES and ready.ready == 0
        ready.replenish((sys.executable, "-u", "train.py"), os.environ)
        assert len(started) == spares._MAX_FAILURES
        ready.close()
