"""The agent: carries out what the controller orders and tells it what happens to the processes.

It has no opinion. An exit, a stop or a hang is reported at once; whether a process is replaced, the job restarted or
ended, is the answer. When the order to end comes, every process is ended, reaped and its output written before the
exit code is returned.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

from evertrain import aio
from evertrain.launch import args, report
from evertrain.launch.config import STDERR, LaunchConfig
from evertrain.launch.events import EventsFile
from evertrain.launch.link import Uplink
from evertrain.launch.output import Outputs
from evertrain.launch.processes import Process, SpareProcess, Spawner, end_session
from evertrain.launch.spares import Spares
from evertrain.launch.stalls import StallWatcher, happened_at
from evertrain.launch.watch import Watcher
from evertrain.mindio import board, protocol, segments, tls

INTERNAL_ERROR = 70
_LAST_WORDS = 200
_SWEEP_DELAY = 1.0
"""Looking for what a dead process left behind reads all of /proc; it must not delay a recovery."""
_LINK_TIMEOUT = 10.0
_SPARE_PATIENCE = 10.0
"""A spare is started after this many seconds even if the first step is not done: it may be a long one."""


class Supervisor:
    def __init__(
        self,
        config: LaunchConfig,
        outputs: Outputs,
        events: EventsFile,
        on_successor: Callable[[str], None] = lambda address: None,
    ) -> None:
        """`on_successor` gets the address of a controller that has taken over."""
        self._on_successor = on_successor
        self._config = config
        self._outputs = outputs
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, Process] = {}
        """The current process of each rank."""
        self._prepared: dict[int, Process] = {}
        """Processes that are to take a rank's place."""
        self._living: set[Process] = set()
        """Everything that has to be reaped: ranks, their predecessors, spares."""
        self._nobody_lives = asyncio.Event()
        self._left_behind: dict[int, set[int]] = {}
        """By session: the processes that may have left something."""
        self._warm_ranks: set[int] = set()
        self._in_incident = False
        self._training_since: float | None = None
        self._signal: int | None = None
        self._kill_at: float | None = None
        self._end: asyncio.Future[protocol.End] = self._loop.create_future()
        self._watcher = Watcher(
            self._loop, config.poll, on_dying=self._on_dying, on_stopped=self._on_stopped, on_ended=self._on_ended
        )
        self._link: Uplink | None = None
        self._told: dict[int, protocol.Observed] = {}
        """The newest fault of each rank; a new controller has to be told again."""
        self._saved = (-1, "")
        """Step and path of the newest checkpoint, as far as heard of."""
        self._used = False
        """Some rank has come to a training of Evertrain."""
        self._left: set[int] = set()
        """Ranks whose process ended with code 0."""
        self._spawner: Spawner | None = None
        self._spares: Spares | None = None
        self._handlers: dict[type[protocol.Message], Callable] = {
            protocol.Spawn: self._on_spawn,
            protocol.Kill: self._on_kill,
            protocol.Prepare: self._on_prepare,
            protocol.Promote: self._on_promote,
            protocol.Incident: self._on_incident,
            protocol.End: self._on_end,
        }

    async def run(self, addresses: list[str], token: str) -> int:
        """Run the job of the controller at one of these addresses; returns the exit code of the launcher."""
        config = self._config
        self._spawner = Spawner(config, self._outputs, token)
        self._spares = Spares(
            self._spawner, config.warm, watch=self._watch, on_ready=self._on_spare, say=self._outputs.say
        )
        try:
            self._link = Uplink(
                addresses,
                lambda: self._hello(token),
                on_message=self._on_message,
                on_linked=self._on_linked,
                on_lost=self._on_link_lost,
                timing=config.timing,
                on_silence=self._leave_controller,
                tenacious=config.nnodes > 1 or config.standby,
                tls=tls.client_context(config.tls) if config.tls else None,
            )
            if not await self._linked(self._link):
                return self._exit_code(self._end.result())
            stalls = StallWatcher(config.timing, self._processes, ping=self._ping, report=self._on_stall)
            chores = [asyncio.create_task(stalls.run()), asyncio.create_task(self._beat())]
            for chore in chores:
                chore.add_done_callback(self._on_chore_done)
            try:
                end = await self._end
            finally:
                for chore in chores:
                    chore.cancel()
                await asyncio.gather(*chores, return_exceptions=True)
            return self._exit_code(end)
        finally:
            await self._end_processes()
            if self._link is not None:
                await self._link.close()
            self._watcher.close()
            self._spawner.close()

    async def _linked(self, link: Uplink) -> bool:
        """Wait for the first link. False if the end came first: a signal, while other nodes were still missing."""
        several = self._config.nnodes > 1
        if several:
            self._outputs.say(f"node {self._config.node_rank} of {self._config.nnodes} looks for the controller")
        opening = asyncio.create_task(link.open(self._config.node_wait if several else _LINK_TIMEOUT))
        either: set[asyncio.Future[Any]] = {opening, self._end}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
            return False
        opening.result()
        return True

    def terminate(self, number: int) -> None:
        """A signal asks for the end of the job: first in order, the second time at once."""
        name = report.signal_name(number)
        if self._signal is not None:
            self._outputs.say(f"{name} again: ending at once")
            self._kill_at = time.monotonic()
            self._finish(128 + number, "a second signal asked for it")
            for process in self._living:
                process.kill()
            return
        self._signal = number
        grace = self._config.timing.grace
        self._kill_at = time.monotonic() + grace
        self._outputs.say(f"{name}: ending the job within {grace:g} s; once more to end it at once")
        if self._link is None or not self._link.linked_before:
            return self._finish(128 + number, f"{name} before there was a controller")
        self._link.send(protocol.Terminate(reason=name, grace=grace))
        # The controller keeps the time; this is for a controller that does not.
        self._loop.call_later(grace + 1.0, self._finish, 128 + number, f"{name}, and no answer from the controller")

    # Orders.

    def _on_message(self, message: protocol.Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _on_spawn(self, order: protocol.Spawn) -> None:
        assert self._spawner and self._spares and self._link
        if self._end.done():
            return
        self._spawner.master = order.master
        self._left.discard(order.rank)
        if order.restart != self._spawner.attempt:
            self._spawner.begin_attempt(order.restart)
            self._outputs.begin_attempt(order.restart)
        if old := self._processes.get(order.rank):
            # The controller may have heard of its broken link first; it still wants to know the cause.
            self._watcher.look(old)
            old.kill()
            del self._processes[order.rank]
        if (process := self._start(order)) is not None:
            self._processes[order.rank] = process

    def _start(self, order: protocol.Spawn | protocol.Prepare) -> Process | None:
        assert self._spawner and self._link
        try:
            process = self._promoted(order) or self._spawner.cold(order.rank, order.incarnation)
        except OSError as error:
            detail = f"its process could not be started: {error}"
            fault = protocol.Fault(kind="start", rank=order.rank, incarnation=order.incarnation, detail=detail)
            self._tell_fault(fault)
            return None
        (self._warm_ranks.add if process.warm else self._warm_ranks.discard)(order.rank)
        if not process.warm:
            self._watch(process)
        self._link.send(
            protocol.Started(rank=order.rank, incarnation=order.incarnation, pid=process.pid, warm=process.warm)
        )
        self._tell_spares()
        return process

    def _on_prepare(self, order: protocol.Prepare) -> None:
        if not self._end.done() and (process := self._start(order)) is not None:
            self._prepared[order.rank] = process

    def _on_promote(self, order: protocol.Promote) -> None:
        process = self._prepared.get(order.rank)
        if process is None or process.incarnation != order.incarnation:
            return
        del self._prepared[order.rank]
        old, self._processes[order.rank] = self._processes.get(order.rank), process
        if old is not None and old.code is None:
            # It was told to leave; whoever is stopped or stuck will not.
            old.doomed = True
            self._loop.call_later(self._config.timing.stop, old.kill)

    def _tell_spares(self) -> None:
        if self._link is not None and self._spares is not None:
            self._link.send(protocol.Spares(ready=self._spares.ready))

    def _promoted(self, order: protocol.Spawn | protocol.Prepare) -> Process | None:
        assert self._spawner and self._spares
        while (spare := self._spares.take()) is not None:
            try:
                self._spawner.promote(spare, order.rank, order.incarnation)
            except OSError:
                spare.kill()
                continue
            return spare
        return None

    def _on_kill(self, order: protocol.Kill) -> None:
        for processes in (self._processes, self._prepared):
            process = processes.get(order.rank)
            if process is not None and process.incarnation == order.incarnation:
                process.kill()
                del processes[order.rank]

    def _on_incident(self, message: protocol.Incident) -> None:
        record = message.record
        self._events.write(record)
        event = record.get("event")
        if event == "fault":
            self._in_incident = True
        elif event == "checkpoint" and not record.get("error") and record.get("ok", True):
            self._saved = max(self._saved, (int(record.get("step", -1)), str(record.get("path", ""))))
        elif line := report.news_line(record):
            self._outputs.say(line)
        elif event == "incident":
            self._in_incident = False
            self._training_since = None
            self._outputs.say(report.incident_line(record, self._warm_ranks))

    def _on_end(self, end: protocol.End) -> None:
        if not self._end.done():
            self._end.set_result(end)

    def fail(self, reason: str) -> None:
        """Something is wrong with the launcher itself; a job that nobody watches must not go on."""
        self._finish(INTERNAL_ERROR, f"internal error: {reason}")

    def _finish(self, code: int, reason: str) -> None:
        self._on_end(protocol.End(code=code, reason=reason))

    def _on_link_lost(self, reason: str) -> None:
        self._finish(INTERNAL_ERROR, reason)

    def _on_chore_done(self, chore: asyncio.Task[None]) -> None:
        if not chore.cancelled() and (error := chore.exception()) is not None:
            while isinstance(error, aio.BaseExceptionGroup):
                error = error.exceptions[0]
            self.fail(f"{type(error).__name__}: {error}")

    def _hello(self, token: str) -> protocol.Hello:
        assert self._spawner
        config = self._config
        living = {rank: process for rank, process in self._processes.items() if process.code is None}
        return protocol.Hello(
            version=protocol.VERSION,
            token=token,
            role="agent",
            ranks=list(config.ranks),
            world_size=config.world_size,
            node=config.node_rank,
            address=self._address(),
            master_port=self._spawner.master_port if config.nnodes > 1 and config.node_rank == 0 else 0,
            # The first two nodes, because a controller may come to be there.
            records=config.node_rank <= 1 or config.events_everywhere,
            at=time.monotonic(),
            incarnations={rank: process.incarnation for rank, process in living.items()},
            booting=[rank for rank, process in living.items() if process.board.activity == board.BOOT],
            left=sorted(self._left),
        )

    def _address(self) -> str:
        config = self._config
        if config.nnodes == 1:
            return ""
        return config.local_addr or (config.master_addr if config.node_rank == 0 else "")

    def _on_linked(self, again: bool) -> None:
        """A controller has accepted this agent. If it is not the first one, it has to hear again what is wrong."""
        assert self._spawner and self._link
        self._spawner.controllers = list(self._link.addresses)
        self._leave_controller(self._link.epoch)
        if self._config.nnodes > 1:
            self._spawner.host = self._address() or self._link.local_host
        if again:
            self._on_successor(self._link.addresses[0])
            for prepared in self._prepared.values():
                prepared.kill()  # whoever asked for it asked another controller
            self._prepared.clear()
            self._tell_spares()
            for rank, observed in self._told.items():
                process = self._processes.get(rank)
                if process is not None and process.reported and process.incarnation == observed.fault.incarnation:
                    self._link.send(observed)
            if self._signal is not None and self._kill_at is not None:
                grace = max(self._kill_at - time.monotonic(), 1.0)
                self._link.send(protocol.Terminate(reason=report.signal_name(self._signal), grace=grace))

    def _leave_controller(self, epoch: int) -> None:
        """Have the ranks leave a controller with a lower number. It may be frozen, and then their links don't break."""
        for process in self._processes.values():
            if process.code is None:
                process.board.epoch = epoch

    # What the processes do.

    def _watch(self, process: Process) -> None:
        self._living.add(process)
        self._nobody_lives.clear()
        self._watcher.add(process)

    def _on_spare(self, spare: SpareProcess) -> None:
        self._tell_spares()
        self._events.tell("spare", pid=spare.pid, warmed_ms=round((time.monotonic() - spare.started_at) * 1000))

    def _on_dying(self, process: Process, code: int) -> None:
        if not self._is_current(process):
            return
        now = time.monotonic()
        detail = report.exit_words(code)
        if code > 0:
            process.streams[STDERR].drain()
            words = process.streams[STDERR].last_words()[:_LAST_WORDS]
            detail += f"; {words}" if words else ""
        self._tell_fault(
            protocol.Fault(
                kind="exit",
                rank=process.rank,
                incarnation=process.incarnation,
                detail=detail,
                exit_code=code,
                at=happened_at(process, now),
            ),
            process,
        )
        # What it started itself must not run on beside its replacement.
        process.kill()

    def _on_stopped(self, process: Process) -> None:
        if isinstance(process, SpareProcess) and process.rank < 0:
            process.send(signal.SIGKILL)  # its end is noted, and another one is made
        elif self._is_current(process):
            at = happened_at(process, time.monotonic())
            detail = "the process was stopped (state T)"
            rank, incarnation = process.rank, process.incarnation
            self._tell_fault(
                protocol.Fault(kind="stopped", rank=rank, incarnation=incarnation, detail=detail, at=at), process
            )

    def _on_stall(self, process: Process, fault: protocol.Fault) -> None:
        if self._is_current(process):
            self._tell_fault(fault, process)

    def _on_ended(self, process: Process, code: int) -> None:
        for stream in process.streams.values():
            self._outputs.forget(stream)
        self._used = self._used or process.board.activity != board.BOOT
        self._left_behind[process.pid] = {process.pid} | process.board.helpers
        self._loop.call_later(_SWEEP_DELAY, self._sweep, process.pid)
        if isinstance(process, SpareProcess) and self._spares is not None:
            self._spares.lost(process)
            self._tell_spares()
        if self._is_current(process) and not process.reported and not process.doomed and self._link is not None:
            self._left.add(process.rank)
            self._link.send(protocol.Ended(rank=process.rank, incarnation=process.incarnation))
        process.close()
        self._living.discard(process)
        if not self._living:
            self._nobody_lives.set()

    def _sweep(self, session: int) -> None:
        processes = self._left_behind.pop(session, None)
        if processes is not None:
            end_session(session)
            segments.remove(processes)

    def _is_current(self, process: Process) -> bool:
        return process in (self._processes.get(process.rank), self._prepared.get(process.rank))

    def _tell_fault(self, fault: protocol.Fault, process: Process | None = None) -> None:
        if self._link is not None:
            # Before its first step a process may hold any state; the controller knows which one it gave it.
            knows = process is not None and process.board.steps_done > 0
            step = process.board.step if process and knows else -1
            partial = fault.kind == "hccl" and self._config.nnodes > 1
            self._told[fault.rank] = protocol.Observed(fault=fault, step=step, partial=partial)
            self._link.send(self._told[fault.rank])

    def _ping(self, rank: int, number: int) -> None:
        if self._link is not None:
            self._link.send(protocol.Suspect(rank=rank, number=number))

    # Chores.

    async def _beat(self) -> None:
        assert self._link
        while True:
            self._link.beat(self._newest_step())
            self._replenish_spares()
            await asyncio.sleep(self._config.timing.heartbeat)

    def _newest_step(self) -> int:
        boards = [process.board for process in self._processes.values() if process.code is None]
        return max((each.step for each in boards if each.steps_done), default=-1)

    def _replenish_spares(self) -> None:
        """A spare is of use only to a script that trains with us, and must not slow down a start or a recovery."""
        assert self._spares and self._spawner
        ranks = [process for process in self._processes.values() if process.code is None]
        if self._in_incident or len(ranks) < self._config.local_size:
            return
        if any(rank.board.activity in (board.BOOT, board.FINISHED) for rank in ranks):
            return
        now = time.monotonic()
        if self._training_since is None:
            self._training_since = now
        if all(rank.board.steps_done for rank in ranks) or now - self._training_since > _SPARE_PATIENCE:
            self._spawner.learned = ranks[0].board.imports
            self._spares.replenish()

    # The end.

    def _exit_code(self, end: protocol.End) -> int:
        code = end.code
        living = [process for process in self._processes.values() if process.code is None]
        self._used = self._used or any(process.board.activity != board.BOOT for process in living)
        if self._signal is not None and code in (130, 143):
            code = 128 + self._signal
            if self._used and self._config.node_rank == 0:
                self._outputs.say(report.saved_line(*self._saved, self._config.checkpoint_dir))
        elif code == 0 and not self._used:
            self._outputs.say("the script does not use evertrain.torch: the launcher ran it unprotected")
        elif code in (130, 143):
            self._outputs.say(f"the job was ended on another node: {end.reason}")
        elif code != 0:
            self._outputs.say(f"the job has failed: {end.reason}" if code != 3 else f"gave up: {end.reason}")
            if end.cause:
                self._outputs.say(f"first cause: {end.cause}")
            if "exited with code 2" in end.cause and (ours := args.misplaced(self._config.script_args)):
                self._outputs.say(f"{', '.join(ours)}: options of the launcher have to stand before the script")
        return code

    async def _end_processes(self) -> None:
        """Nobody is left when this returns."""
        if self._spares is not None:
            self._spares.end()
        for process in self._living:
            process.ask_to_end()
        if self._living:
            now = time.monotonic()
            patience = self._config.timing.grace if self._kill_at is None else max(self._kill_at - now, 0.0)
            await self._wait_for_all(patience)
            for process in self._living:
                process.kill()
            # A process in the kernel can't be killed; its death signal is set, the launcher need not stay for it.
            await self._wait_for_all(5.0)
        for session in list(self._left_behind):
            self._sweep(session)

    async def _wait_for_all(self, seconds: float) -> None:
        if self._living:
            try:
                async with aio.timeout(seconds):
                    await self._nobody_lives.wait()
            except TimeoutError:
                pass
