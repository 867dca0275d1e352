"""The processor of the callback interface: a training process's side of fault tolerance.

Three threads: the link's (`link`), which never blocks; a worker, in which the callbacks run (`orders`); and the keeper,
which sends heartbeats and finds another controller when the link breaks. The training thread comes in by the reporting
functions and waits in `steps` and `mainthread`.
"""

from __future__ import annotations

import math
import queue
import secrets
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from evertrain.mindio import framing, tls
from evertrain.mindio.tft import environment, link, messages
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.mainthread import MainThread
from evertrain.mindio.tft.numbers import ReportState, Result, TrainState
from evertrain.mindio.tft.orders import Orders
from evertrain.mindio.tft.rank import Life, Rank
from evertrain.mindio.tft.steps import Steps

CONNECT = 2.0
"""Seconds for one attempt; a host that is down gives no answer at all."""
SILENT = 5.0
"""Seconds after which somebody who looks at a training that does not begin is told what it waits for."""
REGISTER = 30.0
FAREWELL = 2.0
LEAVE = 0.5
"""Seconds in which the kernel of a frozen controller's host has to take the last word to it."""
AFTERWARDS = 30.0
"""Seconds after which one looks again for a controller that has ended in peace: a platform may have started another."""
_ANSWERS = messages.Order.__args__


def _is_final(error: Exception) -> bool:
    """Trying again does not help: the controller said no, or the certificates don't fit."""
    return (isinstance(error, link.NotWelcome) and not error.passive) or isinstance(error, ssl.SSLError)


class StartFailed(Exception):
    """No controller took this processor."""


@dataclass(frozen=True)
class Settings:
    rank: int
    world_size: int
    local_copy: bool = False
    uce: bool = True
    arf: bool = False
    zit: bool = False
    token: str = ""
    context: ssl.SSLContext | None = None
    mindspore: bool = False


class Processor:
    def __init__(
        self,
        settings: Settings,
        callbacks: Callbacks,
        on_exit: Callable[[], None] = lambda: None,
        on_standby: Callable[[str, int, int], tuple[str, int] | None] = lambda ip, port, epoch: None,
    ) -> None:
        """`on_exit` ends the process; `on_standby(ip, port, epoch)` starts a passive controller and says where it
        listens, or None if there is one already."""
        self.settings = settings
        self.steps = Steps(settings.local_copy, settings.mindspore)
        self.main = MainThread()
        self.rank = Rank(self.steps, self.main)
        self.callbacks = callbacks
        self.reborn = False
        self.hot_switch = False
        self._on_exit, self._on_standby = on_exit, on_standby
        self._lock = threading.Lock()
        self._link: link.Link | None = None
        self._address: tuple[str, int] = ("", 0)
        self._standbys: list[tuple[int, str, int]] = []
        self._welcome = messages.Welcome()
        self._local_ip = ""
        self._registered: queue.SimpleQueue[messages.Registered | None] = queue.SimpleQueue()
        self._ever_registered = False
        self._process = secrets.token_hex(8)
        self._init_report: messages.InitReport | None = None
        self._dp_report: messages.DpReport | None = None
        self._linked = threading.Condition()
        self._linked_at = 0.0
        self._kick = threading.Event()
        self._ended = False
        self._abandoned = False
        self.unprotected = False
        """No controller is left, and none will come: a fault is the training function's own affair again."""
        self._announce_step = False
        self._orders = Orders(
            settings.rank, self.rank, self.steps, self.main, callbacks, self.send, self.beat, settings.mindspore
        )
        self._keeper: threading.Thread | None = None
        self.rank.life = Life.INITED

    # Life.

    def start(self, master_ip: str, port: int, local_ip: str = "") -> None:
        """Connect and register. Raises StartFailed with the reason."""
        self.rank.life = Life.START
        self._address = (master_ip, port)
        self._local_ip = local_ip
        if environment.replaces_process():
            self.rank.learn_repair_id(1)  # a controller that has just taken over knows nothing of a recovery
        self._join([self._address], environment.connect_budget())
        self.rank.life = Life.NORMAL
        self._keeper = threading.Thread(target=self._keep, name="tft-keeper", daemon=True)
        self._keeper.start()

    def led_since(self, moment: float) -> float:
        """Seconds since then in which a controller was there to find a fault. Any number if none will be."""
        current = self._link
        if self.unprotected or self._ended:
            return math.inf
        if current is None:
            return 0.0
        heard = current.heard_at if self._welcome.patience > 0 else time.monotonic()
        return max(0.0, heard - max(moment, self._linked_at))

    def destroy(self, done: bool = True) -> None:
        """Leave. The controller does not miss a processor that says goodbye, which only one may that is done."""
        if self._ended:
            return
        self._ended = True
        self.rank.life = Life.END
        done = done and self.rank.run_status != TrainState.ABNORMAL
        self._kick.set()
        self._registered.put(None)
        self._orders.close()
        current = self._link
        if current is not None:
            if done:
                self.rank.run_status = TrainState.EXIT
                self.beat()
                current.send(messages.Bye())
            current.close(flush=FAREWELL)
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(CONNECT + 1.0)

    @property
    def running(self) -> bool:
        return self.rank.life >= Life.NORMAL and not self._ended

    # Reports of the training thread.

    def report(self, state: ReportState, error_code: str = "", error: str = "") -> None:
        self.rank.report(state, error_code, error)
        self.steps.poke()
        self.main.report()
        self.beat()
        if self.unprotected:
            self._exit("there is no controller any more that could deal with the fault: giving up")

    def end_updating(self, step: int) -> None:
        announce, self._announce_step = self._announce_step, False
        # Before the wait in it: the first step after a recovery is what tells that it worked.
        self.steps.end_updating(step, self.beat if announce else None)

    @property
    def saving(self) -> bool:
        """Whether the dying-gasp checkpoint is being written."""
        return self._orders.saving

    @property
    def replica_groups(self) -> list[messages.ReplicaGroup]:
        return self._init_report.groups if self._init_report is not None else []

    def set_replica(self, groups: list[messages.ReplicaGroup]) -> bool:
        self._init_report = messages.InitReport(
            groups=groups,
            enable_arf=self.settings.arf,
            enable_uce=self.settings.uce,
            enable_zit=self.settings.zit,
        )
        return self._send_for_sure(self._init_report)

    def set_dp_group(self, ranks: list[int]) -> bool:
        self._dp_report = messages.DpReport(ranks=ranks)
        return self._send_for_sure(self._dp_report)

    def _send_for_sure(self, message: messages.Message) -> bool:
        """Now, or when the link is back: registering anew repeats these reports."""
        if self.send(message):
            return True
        with self._linked:
            return self._linked.wait_for(lambda: self._link is not None or self._ended, REGISTER) and not self._ended

    # The link.

    def send(self, message: messages.Message) -> bool:
        current = self._link
        return current is not None and current.send(message)

    def beat(self) -> None:
        """Tell the controller now what this rank is like."""
        self.send(messages.Heartbeat(status=self.rank.status(), repair_id=self.rank.repair_id))

    def _on_message(self, message: messages.Message) -> None:
        if isinstance(message, _ANSWERS):
            if isinstance(message, messages.NotifyNormal):
                self._announce_step = True
            self._orders.take(message)
        elif isinstance(message, messages.Registered):
            self._registered.put(message)
        elif isinstance(message, messages.Standbys):
            self._learn_standbys(message)
        elif isinstance(message, messages.Destroyed):
            self._abandoned = True
        elif isinstance(message, messages.Exit):
            threading.Thread(target=self._exit, name="tft-exit", daemon=True).start()

    def _exit(self, why: str = "the controller ends this process") -> None:
        logger.error("%s", why)
        handler = threading.Thread(target=self.callbacks.exit, name="tft-exit-handler", daemon=True)
        handler.start()
        handler.join(environment.action_limit())  # a stuck handler must not keep the process
        self.main.release_exit()
        self._on_exit()

    def _learn_standbys(self, message: messages.Standbys) -> None:
        self._standbys = [entry for entry in message.addresses if entry[2]]
        for place, (rank, ip, port) in enumerate(message.addresses):
            if rank == self.settings.rank:
                arguments = (ip, port, message.epoch + place + 1)
                threading.Thread(target=self._stand_by, args=arguments, name="tft-standby", daemon=True).start()

    def _stand_by(self, ip: str, port: int, epoch: int) -> None:
        try:
            where = self._on_standby(ip, port, epoch)
        except Exception:
            logger.exception("no standby controller could be started at %s:%d", ip, port)
            return
        if where is not None and where != (ip, port):
            self.send(messages.StandbyUp(ip=where[0], port=where[1]))

    def _on_lost(self, lost: link.Link) -> None:
        if self._link is lost:
            self._link = None
            self._registered.put(None)
            self._kick.set()

    # Finding a controller.

    def _join(self, addresses: list[tuple[str, int]], budget: float) -> None:
        """Connect to the first of these that leads the job, and register. Tried over and over for `budget` seconds."""
        start = time.monotonic()
        deadline = start + budget
        pause = 0.02
        reason = "no address"
        silent = not self._ever_registered
        while not self._ended:
            for address in addresses:
                try:
                    self._open(address, deadline)
                    return
                except (OSError, link.NotWelcome, framing.ProtocolError) as error:
                    reason = f"{address[0]}:{address[1]}: {tls.reason(error)}"
                    if not self._ever_registered and _is_final(error):
                        raise StartFailed(reason) from None
            if silent and time.monotonic() > start + SILENT:
                silent = False
                self._say_that_it_waits(reason)
            if time.monotonic() + pause > deadline:
                break
            self._kick.clear()
            self._kick.wait(pause)
            pause = min(pause * 2, 0.25 if self._ever_registered and not self.unprotected else 1.0)
        raise StartFailed(f"no controller took this processor within {budget:g} s; last: {reason}")

    def _say_that_it_waits(self, reason: str) -> None:
        text = f"rank {self.settings.rank} waits for the controller: {reason}"
        logger.warning("%s", text)
        print(f"mindio_ttp: {text}", file=sys.stderr, flush=True)

    def _open(self, address: tuple[str, int], deadline: float) -> None:
        hello = messages.Hello(
            version=messages.VERSION,
            rank=self.settings.rank,
            token=self.settings.token,
            world_size=self.settings.world_size,
            ip=self._local_ip,
            process=self._process,
        )
        opened, welcome = link.connect(address, hello, self.settings.context, CONNECT)
        while not self._registered.empty():
            self._registered.get()
        if address != self._address or welcome.instance != self._welcome.instance:
            self._orders.begin_anew()
        self._address, self._welcome = address, welcome
        self._linked_at = time.monotonic()
        self._link = opened
        opened.start(self._on_message, self._on_lost)
        try:
            self._register(opened, max(deadline, time.monotonic() + REGISTER))
        except BaseException:
            self._link = None
            opened.close()
            raise
        with self._linked:
            self._linked.notify_all()

    def _register(self, opened: link.Link, deadline: float) -> None:
        """A rank that counts as healthy can't register during a repair: asked again until the controller has noticed
        that its old process is gone."""
        pause = 0.05
        while True:
            opened.send(
                messages.Register(
                    status=self.rank.status(), repair_id=self.rank.repair_id, replaces=not self._ever_registered
                )
            )
            try:
                answer = self._registered.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise link.NotWelcome("the registration was not answered") from None
            if answer is None:
                raise ConnectionError("the link broke while registering")
            if answer.result == Result.STOP_SERVICE:
                self._exit("another process has taken the place of this one")
                raise StartFailed("another process has taken the place of this one")
            if answer.result != Result.ERROR:
                break
            if time.monotonic() + pause > deadline or opened.lost:
                raise link.NotWelcome("the registration was refused: this rank counts as healthy elsewhere")
            time.sleep(pause)
            pause = min(pause * 2, 1.0)
        if not self._ever_registered:
            self._ever_registered = True
            self.reborn, self.hot_switch = answer.repair_id != 0, answer.hot_switch
            if answer.result == Result.REPAIR:
                self.rank.run_status = TrainState.ISOLATE
        self.rank.learn_repair_id(answer.repair_id)
        for report in (self._init_report, self._dp_report):
            if report is not None:
                opened.send(report)

    # The keeper's thread.

    def _keep(self) -> None:
        suspicious = 0
        while not self._ended:
            current = self._link
            if current is None:
                if self._abandoned or not self._find_controller():
                    self._alone()
                    if not self._may_hope():
                        return
                continue
            heartbeat, patience = self._welcome.heartbeat, self._welcome.patience
            now = time.monotonic()
            # Looked at twice: it may have been this process that stood still, and what was said meanwhile is not read.
            suspicious = suspicious + 1 if 0 < patience < now - current.heard_at else 0
            if suspicious > 2:
                logger.error("the controller has said nothing for %.0f s", now - current.heard_at)
                self._link = None
                current.send(messages.Leaving())
                current.close(flush=LEAVE)
                continue
            left = current.sent_at + heartbeat - now
            if left <= 0:
                self.beat()
                left = heartbeat
            if self._kick.wait(left):
                self._kick.clear()

    def _find_controller(self) -> bool:
        logger.warning("the link to the controller at %s:%d is broken", *self._address)
        others = [(ip, port) for _, ip, port in self._standbys if (ip, port) != self._address]
        try:
            self._join([self._address, *others], environment.connect_budget())
        except StartFailed as error:
            if not self._ended:
                logger.error("%s", error)
            return False
        logger.warning("registered with the controller at %s:%d", *self._address)
        self.unprotected = False
        return not self._ended

    def _may_hope(self) -> bool:
        """A platform may start another controller; after one that ended in peace, not at once."""
        if not environment.under_platform() or self._ended or self.rank.life != Life.NORMAL:
            return False
        if self._abandoned:
            self._abandoned = False
            until = time.monotonic() + AFTERWARDS
            while not self._ended and (left := until - time.monotonic()) > 0:
                self._kick.wait(left)
                self._kick.clear()
        return not self._ended

    def _alone(self) -> None:
        """No controller is left. Training goes on without protection; a recovery can't."""
        if self._ended:
            return
        known, self.unprotected = self.unprotected, True
        if self.rank.life == Life.NORMAL:
            if known:
                return
            logger.warning("there is no controller any more; training goes on without protection")
            self.main.end_pause()
            return
        self._exit("there is no controller any more to end the recovery: giving up")
