"""The controller of the callback interface on real sockets, and the functions that start and steer it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from evertrain.mindio import framing, protocol
from evertrain.mindio.tft import api_controller as api
from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.controller import Controller
from evertrain.mindio.tft.numbers import Result, TrainState
from evertrain.mindio.tft.processor import Processor
from evertrain.mindio.tft.processor import Settings as ProcessorSettings
from evertrain.mindio.tft.settings import Settings
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


class Peer:
    """A rank as the controller sees it: a socket. Orders are answered by OK unless a test reads them itself."""

    def __init__(self, address: tuple[str, int], rank: int, **hello: Any) -> None:
        self.rank = rank
        self.status = w.Status(step=5)
        self._socket = socket.create_connection(address, timeout=90)
        self._reader, self._writer = protocol.FrameReader(w.decoder), framing.FrameWriter()
        self._read: list[Any] = []
        self.seen: list[Any] = []
        self.say(w.Hello(**{"version": w.VERSION, "rank": rank} | hello))

    def say(self, *messages: Any) -> None:
        self._socket.sendall(b"".join(self._writer.frame(message) for message in messages))

    def next(self) -> Any:
        """The next message; None when the controller has closed the link."""
        while not self._read:
            try:
                data = self._socket.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._read = self._reader.feed(data)
        message = self._read.pop(0)
        self.seen.append(message)
        return message

    def join(self, replaces: bool = True) -> w.Registered:
        assert isinstance(self.until(w.Welcome), w.Welcome)
        self.say(w.Register(status=self.status, replaces=replaces))
        return self.until(w.Registered)

    def report(self, ranks: list[int]) -> None:
        self.say(w.InitReport(groups=[w.ReplicaGroup(rank_list=ranks, replica_cnt=len(ranks))], enable_arf=True))

    def until(self, *kinds: type) -> Any:
        """Obey until one of these comes."""
        while not isinstance(message := self.next(), kinds):
            assert message is not None, f"closed before one of {kinds}; saw {self.seen}"
            self.obey(message)
        return message

    def obey(self, message: Any) -> None:
        if isinstance(message, w.Order):
            self.say(w.Reply(sn=message.sn, result=0, status=self.status))

    def run(self) -> threading.Thread:
        """Obey until the link is closed."""

        def loop() -> None:
            with contextlib.suppress(OSError):
                while (message := self.next()) is not None:
                    self.obey(message)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        return thread

    def names(self) -> list[str]:
        """What was said to this rank, without the signs of life, which come by the clock."""
        return [type(message).__name__ for message in self.seen if not isinstance(message, w.Alive)]

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def controller(world: int = 2, **options: Any) -> Iterator[Controller]:
    given = {name: options.pop(name) for name in ("token", "platform", "context") if name in options}
    running = Controller(Settings(world_size=world, **options), "127.0.0.1", **given)
    running.start()
    try:
        yield running
    finally:
        running.destroy()


@pytest.fixture
def clean_api() -> Iterator[None]:
    yield
    api.tft_destroy_controller()
    api._callbacks.clear()


def test_a_death_is_answered_by_a_checkpoint() -> None:
    with controller(world=3, rank=-1) as running:
        peers = [Peer(running.address, rank) for rank in range(3)]
        for peer in peers:
            assert peer.join() == w.Registered(result=0)
            peer.report([0, 1, 2])
        thread = peers[1].run()
        peers[2].close()
        assert peers[0].until(w.SaveCheckpoint).groups == [w.SaveGroup(kind=0, ranks=[0])]
        peers[0].say(w.Reply(sn=peers[0].seen[-1].sn, result=0, status=peers[0].status))
        assert isinstance(peers[0].until(w.Rename), w.Rename)
        peers[0].obey(peers[0].seen[-1])
        assert isinstance(peers[0].until(w.Exit), w.Exit)
        running.destroy()
        thread.join(90)
        assert peers[1].names() == ["Welcome", "Registered", "Collect", "Prelock", "Exit", "Destroyed"]
        for peer in peers[:2]:
            peer.close()


def test_the_token_is_checked_and_not_told() -> None:
    with controller(token="the-secret-of-this-job") as running:
        wrong = Peer(running.address, 0, token="guess")
        assert wrong.next() == w.Refused(reason="wrong job token")
        assert wrong.next() is None
        right = Peer(running.address, 0, token="the-secret-of-this-job")
        assert isinstance(right.next(), w.Welcome)
        for peer in (wrong, right):
            peer.close()


def test_nonsense_closes_a_link_and_nothing_else() -> None:
    with controller() as running:
        good = Peer(running.address, 0)
        good.join()
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc"):
            with socket.create_connection(running.address, timeout=90) as link:
                link.sendall(nonsense)
                assert link.recv(100) == b""
        assert running.linked == 1
        good.close()


def test_the_end_is_told() -> None:
    with controller() as running:
        peer = Peer(running.address, 0)
        peer.join()
        running.destroy()
        assert isinstance(peer.until(w.Destroyed), w.Destroyed)
        assert peer.next() is None
        peer.close()


def test_the_platform_is_asked_in_its_own_thread(clean_api: None) -> None:
    """A conversation in which every answer is given from within the callback, as TaskD does it."""
    told: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()

    def report(name: str, answer: Callable[[], int] | None) -> None:
        def callback(*args: Any) -> None:
            told.put((name, args))
            if answer is not None:
                assert answer() == 0

        assert api.tft_register_mindx_callback(name, callback) == 0

    report("report_fault_ranks", lambda: api.tft_notify_controller_stop_train({1: 1}))
    report("report_stop_complete", lambda: api.tft_notify_controller_on_global_rank({1: 1}, 5))
    report("report_strategies", lambda: api.tft_notify_controller_change_strategy("recover"))
    report("report_result", None)
    port = free_port()
    api.tft_init_controller(-1, 2, False, enable_arf=True)
    api.tft_start_controller("127.0.0.1", port, enable_tls=False)
    assert not api.tft_query_high_availability_switch()
    peers = [Peer(("127.0.0.1", port), rank) for rank in range(2)]
    for peer in peers:
        peer.join()
        peer.report([0, 1])
    assert api.tft_query_high_availability_switch()

    peers[1].say(w.Heartbeat(status=w.Status(step=5, run_status=TrainState.ABNORMAL, error_code="e30003")))
    peers[0].until(w.DeviceClean)
    peers[0].obey(peers[0].seen[-1])
    assert told.get(timeout=90) == ("report_fault_ranks", ({1: 1}, {1: "e30003"}))
    assert told.get(timeout=90)[1][0] == 0
    assert told.get(timeout=90) == ("report_strategies", ({1: 1}, ["exit", "dump", "recover"]))
    peers[1].close()

    new = Peer(("127.0.0.1", port), 1)
    assert new.join() == w.Registered(result=Result.REPAIR, repair_id=1)
    new.status = w.Status(run_status=TrainState.PREREPAIR_FINISH)
    new.say(w.Heartbeat(status=new.status))
    thread = new.run()
    assert peers[0].until(w.RebuildGroup).fault_ranks == [1]
    peers[0].obey(peers[0].seen[-1])
    unit = peers[0].until(w.Repair).units[0]
    assert (unit.src, unit.dst) == (0, 1)
    peers[0].obey(peers[0].seen[-1])
    peers[0].until(w.NotifyNormal)
    peers[0].obey(peers[0].seen[-1])
    peers[0].say(w.Heartbeat(status=w.Status(step=6)))
    assert told.get(timeout=90) == ("report_result", (0, "Mindio do repair operation ok", {}, "recover"))
    for peer in (peers[0], new):
        peer.close()
    thread.join(90)


def test_what_the_functions_refuse(clean_api: None) -> None:
    for arguments in ((-2, 4), (4, 4), (0, 0), (0, 100_001), ("0", 4), (True, 4)):
        with pytest.raises(Exception, match="world_size"):
            api.tft_init_controller(*arguments, False)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as before_init:
        api.tft_start_controller("127.0.0.1", free_port(), False)
    assert before_init.value.code == 2
    assert api.tft_notify_controller_dump() == 1
    api.tft_init_controller(0, 4, False)
    api.tft_init_controller(0, 4, False)
    for host, port in (("0.0.0.0", 8000), ("::", 8000), ("", 8000), ("127.0.0.1", 80), ("127.0.0.1", 70000)):
        with pytest.raises(SystemExit) as refused:
            api.tft_start_controller(host, port, False)
        assert refused.value.code == 2
    api.tft_start_controller("localhost", free_port(), False)
    api.tft_start_controller("localhost", 1, False)
    assert api.tft_register_mindx_callback("report_nothing", print) == 1
    assert api.tft_register_mindx_callback("report_result", None) == 1  # type: ignore[arg-type]
    assert api.tft_notify_controller_stop_train({0: 1}) == 1, "the rank is not known"
    assert api.tft_notify_controller_stop_train({}, "halt") == 1
    assert api.tft_notify_controller_stop_train({}, "pause") == 1
    assert api.tft_notify_controller_stop_train([], "stop") == 1  # type: ignore[arg-type]
    assert api.tft_notify_controller_on_global_rank({}, 0) == api.tft_notify_controller_on_global_rank({}, 3601) == 1
    assert api.tft_notify_controller_prepare_action("cold switch") == 1
    assert api.tft_notify_controller_prepare_action("hot switch") == 1
    assert api.tft_notify_controller_prepare_action("stop switch") == 0
    assert api.tft_notify_controller_change_strategy("pray") == 1
    assert api.tft_notify_controller_change_strategy("downgrade", "") == 1
    assert api.tft_notify_controller_change_strategy("upgrade", "x" * 1024) == 1


def test_a_controller_without_a_processor_has_a_log(
    clean_api: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))
    api.tft_init_controller(-1, 2, False)
    api.tft_start_controller("127.0.0.1", free_port(), False)
    api.tft_notify_controller_change_strategy("pray")
    api.tft_destroy_controller()
    (file,) = (tmp_path / "logs").iterdir()
    assert "'pray' was not offered" in file.read_text() and file.stat().st_mode & 0o777 == 0o440


def test_a_second_controller_on_the_same_port_says_why_it_can_t_start() -> None:
    with controller() as running:
        script = (
            "from mindio_ttp.controller_ttp import tft_init_controller, tft_start_controller\n"
            "tft_init_controller(0, 4, False)\n"
            f"tft_start_controller('127.0.0.1', {running.address[1]}, False)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "could not be started" in done.stdout and "in use" in done.stdout


@pytest.mark.matrix
def test_a_standby_leads_when_half_of_the_ranks_have_come() -> None:
    settings: dict[str, Any] = {"world": 4, "passive": True, "epoch": 1, "rank": 1, "knock": 3.0, "takeover": 30.0}
    with controller(**settings) as running:
        early = Peer(running.address, 1)
        refused = early.next()
        assert isinstance(refused, w.Refused) and refused.passive
        early.close()
        peers = [Peer(running.address, rank) for rank in (1, 2, 3)]
        for peer in peers:
            assert peer.join(replaces=False) == w.Registered(result=0, repair_id=20_000)
            peer.report([0, 1, 2, 3])
        threads = [peer.run() for peer in peers[1:]]
        order = peers[0].until(w.SaveCheckpoint)  # rank 0 was lost with the old controller
        assert order.repair_id == 20_001 and order.sn > 1 << 40
        peers[0].obey(order)
        peers[0].until(w.Exit)
        for peer in peers:
            peer.close()
        for thread in threads:
            thread.join(90)


@pytest.mark.matrix
def test_a_frozen_controller_is_left_for_a_standby() -> None:
    """Its links stay, its kernel accepts new ones; only it says nothing more."""
    frozen = threading.Event()
    with (
        controller(world=2, rank=0, alive=0.2) as first,
        controller(world=2, rank=1, passive=True, epoch=1, alive=0.2, takeover=1.0) as standby,
    ):
        ranks = [Processor(ProcessorSettings(rank=rank, world_size=2), Callbacks()) for rank in range(2)]
        try:
            for rank in ranks:
                rank.start(*first.address)
                rank._standbys = [(1, *standby.address)]
            first._post(frozen.wait, 200)
            deadline = time.monotonic() + 150
            while standby.linked < 2:
                assert time.monotonic() < deadline, "nobody left the frozen controller"
                threading.Event().wait(0.05)
            assert standby.machine.active and all(rank.running for rank in ranks)
            frozen.set()
            while first.machine.ended is None:
                assert time.monotonic() < deadline, "two controllers lead"
                threading.Event().wait(0.05)
            assert standby.machine.ended is None
        finally:
            frozen.set()
            for rank in ranks:
                rank.destroy()
