"""A rank's end of the link, with a controller that is slow or frozen."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from evertrain.mindio import framing, processor
from evertrain.mindio import protocol as p
from evertrain.mindio.board import Board
from evertrain.mindio.processor import Processor
from evertrain.mindio.timing import Timing


class Controller:
    """Accepts links and welcomes whoever comes; reads only when it is told to."""

    def __init__(self, epoch: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._epoch = epoch
        self.links: list[socket.socket] = []

    def accept(self) -> p.Message:
        link, _ = self._listener.accept()
        link.settimeout(20)
        self.links.append(link)
        self.reader = p.FrameReader()
        (hello,) = self.read(1)
        link.sendall(framing.FrameWriter().frame(p.Welcome(epoch=self._epoch)))
        return hello

    def read(self, count: int) -> list[p.Message]:
        found: list[p.Message] = []
        while len(found) < count:
            data = self.links[-1].recv(1 << 20)
            assert data, "the link was cut"
            found += self.reader.feed(data)
        return found

    def close(self) -> None:
        for each in (*self.links, self._listener):
            each.close()


@pytest.fixture
def controllers() -> Iterator[list[Controller]]:
    made = [Controller(), Controller(epoch=1)]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def rank(controllers: list[Controller], monkeypatch: pytest.MonkeyPatch) -> Iterator[Processor]:
    monkeypatch.setattr(processor, "_LOOK", 0.05)
    board = Board()
    addresses = [controller.address for controller in controllers]
    link = Processor(addresses, "t", rank=0, board=board, patience=20.0)
    accepting = threading.Thread(target=controllers[0].accept)
    accepting.start()
    link.connect()
    accepting.join()
    link.board_of_test = board
    yield link
    link.close()
    board.close()


def test_a_big_message_may_take_longer_than_a_look_at_the_controller(rank: Processor, controllers) -> None:
    value = bytes(9 << 20)
    sending = threading.Thread(target=rank.store_set, args=("prelude/x", value))
    sending.start()
    sending.join(0.5)
    assert sending.is_alive(), "it must be more than the system takes without being read"
    (message,) = controllers[0].read(1)
    assert message == p.StoreSet(key="prelude/x", value=value)
    sending.join(20)
    assert not rank.lost and len(controllers[0].links) == 1


def test_a_frozen_controller_is_left_in_the_middle_of_a_message(rank: Processor, controllers) -> None:
    sending = threading.Thread(target=rank.store_set, args=("prelude/x", bytes(9 << 20)))
    sending.start()
    assert select.select(controllers[0].links, [], [], 20)[0], "the message has begun"
    rank.board_of_test.epoch = 1  # the agent has turned to the other one
    hello = controllers[1].accept()
    assert isinstance(hello, p.Hello) and hello.rank == 0
    sending.join(20)
    assert not sending.is_alive() and not rank.lost


LATE = "from evertrain.torch import link; link.open_link()"


def late_rank(address: tuple[str, int]) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "RANK": "1", "WORLD_SIZE": "2", "EVERTRAIN_CONTROLLER": "{}:{}".format(*address),
        "EVERTRAIN_TOKEN": "t", "EVERTRAIN_TIMING": json.dumps(asdict(Timing.derive(0.5))),
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", LATE], env=environment, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_comes_when_the_job_is_over_leaves_without_a_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        rank = late_rank(listener.getsockname())
        link, _ = listener.accept()
        link.sendall(framing.FrameWriter().frame(p.Refused(reason="the job is over", over=True)))
        assert (rank.communicate(timeout=60)[1], rank.returncode) == ("", 75)
        link.close()


def test_a_rank_that_finds_no_controller_says_so_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    rank = late_rank(address)
    said = rank.communicate(timeout=60)[1]
    assert rank.returncode == 1
    assert said == f"evertrain: rank 1 has no controller (127.0.0.1:{address[1]}): [Errno 111] Connection refused\n"
