"""A protected run of the training function: the rank's side of start, recovery and end.

All three are one flow. The training thread gets *out* of user code and says so; the controller waits for everybody,
names the step to go on from, has everybody join a new generation of the process group, has those that lack the state
receive it, and lets everybody go. While it is out, the thread does nothing but carry out the controller's
instructions one by one, so there is a single place where the state of a rank changes hands.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from evertrain.mindio import board as activities
from evertrain.mindio import plan, protocol, shares
from evertrain.mindio.board import Board
from evertrain.mindio.classify import classify
from evertrain.mindio.processor import LinkLost, Processor, StoreCancelled
from evertrain.mindio.timing import Timing
from evertrain.torch import backends, codec, groups, imports, repair
from evertrain.torch.checkpoint import CheckpointError
from evertrain.torch.errors import UsageError, user_frames
from evertrain.torch.fsdp import StepAside
from evertrain.torch.inject import Injector
from evertrain.torch.interrupt import Interrupted, Interrupter
from evertrain.torch.lasting import keeper
from evertrain.torch.link import EXIT_TOLD
from evertrain.torch.part_checkpoints import PartCheckpoints
from evertrain.torch.pausing import Pausing
from evertrain.torch.reducer import Reducer
from evertrain.torch.state import StateError, TrainingState
from evertrain.torch.store import LinkStore

T = TypeVar("T")

_MAX_STACK = 8000


class Session:
    def __init__(
        self,
        *,
        processor: Processor,
        rank: int,
        world_size: int,
        timing: Timing,
        board: Board,
        state: TrainingState,
        reducer: Reducer | StepAside,
        injector: Injector,
        interrupter: Interrupter,
        checkpoints: PartCheckpoints | None,
        on_go: Callable[[], None],
        can_share: Callable[[], bool] = bool,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._processor, self._timing, self._board = processor, timing, board
        self._state, self._reducer, self._injector = state, reducer, injector
        self._interrupter, self._checkpoints = interrupter, checkpoints
        self._on_go, self._can_share = on_go, can_share
        self._backend = backends.pick(next(state.model.parameters()).device.type)
        self._group: groups.GuardedGroup | None = None
        self._cancel = threading.Event()
        self._taken = -1  # attempt of the newest Stop that this thread has answered
        self._generation = 0
        self._members = list(range(world_size))
        self._pausing = Pausing(processor)
        processor.on_pause = lambda message: self._pausing.hear(message, self._state)
        self._stop_in_hand: protocol.Stop | None = None
        self.shares: tuple[int, ...] = (rank,)
        """The ranks whose data this one goes through in each step: its own, and those of missing ones."""
        self.dealt: dict[int, tuple[int, ...]] = {each: (each,) for each in range(world_size)}
        self.rounds = 1
        """How many of them the busiest rank has."""
        self._resume_due = False
        self._out = True
        self._fresh = True
        self._held: dict[str, int] = {}
        """Which parts of the state are clean, and at which step. It means something while the thread is out."""
        self._broken = ""
        self.update_open = False
        """From the beginning of the optimizer update to the end of the step: the state is between two steps."""

    # Called by the link's reader thread.

    def stop_now(self) -> None:
        self._cancel.set()
        self._interrupter.request()
        keeper.stop()
        self._say_if_updating()

    def _say_if_updating(self) -> None:
        """Called by both threads, each after it has set what the other one looks at: one of them sees both."""
        if self.update_open and self._interrupter.pending:
            self._processor.send(protocol.Updating(attempt=self._processor.newest_stop))

    # Called by the training loop.

    def begin_update(self) -> None:
        if not self.update_open:
            self._interrupter.raise_shield()
            self.update_open = True
            self._board.mark(activities.UPDATE)
            self._say_if_updating()

    def end_step(self, advance: Callable[[], None]) -> None:
        """The step is complete: move on to the next one, and only then let a waiting interrupt through."""
        self._interrupter.raise_shield()
        with self._pausing.lock:
            advance()
        if self._resume_due:
            self._board.leave_imports(imports.loaded())  # a spare is started when it sees the progress
        self._board.progress(self._state.step)
        if self._resume_due:
            self._resume_due = False
            self._processor.send(
                protocol.Resumed(generation=self._generation, step=self._state.step, elastic=self._can_share())
            )
        if self.update_open:
            self.update_open = False
            self._interrupter.lower_shield()
        due = self._pausing.number and self._pausing.is_due(self._state.step)
        self._interrupter.lower_shield()
        if due:
            self._pause()

    def _pause(self) -> None:
        """Wait between two steps, together with all other ranks, until told to go on or to get out."""
        self._interrupter.raise_shield()
        self._board.mark(activities.OUTSIDE)
        told = False
        while self._pausing.is_due(self._state.step):
            if self._pausing.agreed and not told:
                told = True
                self._processor.send(protocol.Paused(generation=self._generation, step=self._state.step))
            message = self._receive()
            if isinstance(message, protocol.Continue):
                self._pausing.end(message.number)
            if isinstance(message, protocol.Stop):
                self._stop_in_hand = message
                raise Interrupted("told to leave the training code while it paused")
            if isinstance(message, protocol.Exit):
                self._exit(message.reason)
        self._board.mark(activities.COMPUTE)
        self._interrupter.lower_shield()

    @property
    def is_first(self) -> bool:
        """The lowest rank that is there: it does what one rank does for all."""
        return self.rank == self._members[0]

    def log(self, name: str, **fields: Any) -> None:
        self._processor.send(protocol.Log(name=name, fields=fields))

    def run(self, function: Callable[[], T], finish_step: Callable[[], None]) -> T:
        """Call the training function until it has returned on all ranks."""
        self._interrupter.install()
        # What the script has built up to here stays; without this, a full collection in the middle of a recovery looks
        # at all of it for a tenth of a second.
        gc.freeze()
        self._injector.step = self._state.step
        self._injector("start")
        self._held = self._state.all_parts()
        self._send_out(None)
        self._follow()
        while True:
            fault: protocol.Fault | None = None
            try:
                try:
                    self._interrupter.arm()
                    result = function()
                    if self.update_open:
                        finish_step()  # the loop was left by `break` after the last update
                finally:
                    self._interrupter.disarm()
                if self._finish():
                    return result
            except Interrupted:
                if self._broken:
                    fault = self._fault("link", self._broken, "")
            except UsageError as error:
                # The controller has the launcher say it, once for all ranks.
                fault = self._fault("script", str(error), user_frames(error))
            except Exception as error:
                fault = self._fault(
                    classify(error),
                    f"{type(error).__name__}: {error}",
                    "".join(traceback.format_exception(error))[-_MAX_STACK:],
                )
                print(fault.stack, end="", file=sys.stderr, flush=True)
            else:
                continue
            # The frames of the failed call are gone here, and with them the graph and the batch that they held.
            self._leave(fault)
            stop, self._stop_in_hand = self._stop_in_hand, None
            if stop is not None:
                self._take(stop)
            if fault is not None or stop is not None:
                self._send_out(fault)  # otherwise a Stop is in the queue, and taking it sends the Out
            self._follow()

    def _finish(self) -> bool:
        """Stay available as a source until everybody is done. False if a recovery came in between."""
        self._board.mark(activities.FINISHED)
        self._resume_due = False
        self._processor.send(protocol.Finished(step=self._state.step))
        while True:
            message = self._receive()
            if isinstance(message, protocol.Release):
                if self._checkpoints is not None:
                    self._checkpoints.wait()
                return True
            if isinstance(message, protocol.Stop):
                self._take(message)
                self._leave(None)
                self._send_out(None)
                self._follow()
                return False
            if isinstance(message, protocol.Exit):
                self._exit(message.reason)

    # Out of user code.

    def _fault(self, kind: str, detail: str, stack: str) -> protocol.Fault:
        injected = self._board.fault_at
        at = injected if injected >= self._board.marked_at else time.monotonic()
        return protocol.Fault(kind=kind, rank=self.rank, detail=detail[:2000], stack=stack, at=at)

    def _leave(self, fault: protocol.Fault | None) -> None:
        """The thread has just left user code: settle what its state is worth."""
        self._interrupter.acknowledge()
        self._board.mark(activities.OUTSIDE)
        self._abandon_group()
        self._broken = ""
        self._resume_due = False
        if self.update_open:
            self.update_open = False
            self._held = self._state.abandon_update()
        else:
            self._held = self._state.all_parts()
            if not self._state.rollback():
                del self._held[protocol.STATE]
        if fault is not None and fault.kind == "uce":
            self._held = {}
            self._state.forget_other_copies()

    def _take(self, stop: protocol.Stop) -> None:
        self._taken = stop.attempt
        if self._taken >= self._processor.newest_stop:
            self._cancel.clear()
            self._interrupter.acknowledge()

    def _send_out(self, fault: protocol.Fault | None) -> None:
        newest = -1 if self._checkpoints is None else (self._checkpoints.newest_step() or -1)
        clean = self._held == self._state.all_parts()
        also = [] if clean else list(self._held.items())
        self._processor.send(
            protocol.Out(
                step=self._state.step,
                clean=clean,
                attempt=self._taken,
                fresh=self._fresh,
                fault=fault,
                fingerprint=self._state.fingerprint,
                summary=self._state.summary,
                state_bytes=self._state.nbytes(),
                checkpoint=newest,
                parts=tuple(self._state.parts),
                also=also + self._state.other_copies(),
            )
        )

    def _follow(self) -> None:
        """Carry out the controller's instructions until it says go."""
        self._out = True
        self._board.mark(activities.OUTSIDE)
        while True:
            message = self._receive()
            match message:
                case protocol.Stop():
                    self._take(message)
                    self._abandon_group()
                    self._send_out(None)
                case protocol.Exit():
                    self._exit(message.reason)
                case protocol.Dump():
                    self._dump(message)
                case protocol.Release():
                    continue
                case _ if self._taken < self._processor.newest_stop:
                    continue  # overtaken by a Stop that is still in the queue
                case protocol.Join():
                    self._join(message)
                case protocol.Repair():
                    self._repair(message)
                case protocol.Go():
                    if message.generation == self._generation and self._group is not None:
                        if message.step == self._state.step:
                            self._pausing.end(message.pauses)
                            self._go()
                            return
                        self._send_out(self._fault("repair", f"told to go on from step {message.step}", ""))

    def _receive(self) -> protocol.Message:
        try:
            return self._processor.receive()
        except LinkLost:
            self._exit("the link to the controller is gone")

    def _join(self, join: protocol.Join) -> None:
        self._abandon_group()
        self._generation, self._members = join.generation, join.members
        try:
            group = self._build(join, "", join.members)
            keeper.begin(
                self.rank,
                join.members,
                group,
                lambda name, ranks: self._build(join, f"groups/{name}/", ranks),
                self._on_wait,
            )
        except (Interrupted, StoreCancelled):
            keeper.leave()
            return  # a Stop is on its way, or it was the cause
        except Exception as error:
            keeper.leave()
            self._processor.send(protocol.Joined(generation=join.generation, error=f"{type(error).__name__}: {error}"))
            return
        self._group = group
        if self._cancel.is_set():
            keeper.stop()
        digests = {}
        if join.need_digest:
            for name, part in self._state.parts.items():
                if self._has(name, join.step):
                    digests[name] = codec.digest(part.core())
        self._processor.send(protocol.Joined(generation=join.generation, digests=digests))

    def _has(self, part: str, step: int) -> bool:
        """Whether there is a clean copy of that step; if there is, it is the present one from here on."""
        if self._held.get(part) != step and self._state.switch(part, step):
            self._held[part] = step
        return self._held.get(part) == step

    def _build(self, join: protocol.Join, place: str, members: list[int]) -> groups.GuardedGroup:
        """Build one group of a generation; `place` keeps it apart from the others in the generation's store."""
        return groups.build(
            join.generation,
            members.index(self.rank),
            len(members),
            LinkStore(self._processor, join.prefix + place, self._timing.group),
            self._backend,
            timeout=self._timing.group,
            cancelled=self._cancel,
            on_broken=self._on_broken,
            on_wait=self._on_wait,
        )

    def _repair(self, message: protocol.Repair) -> None:
        if message.generation != self._generation or self._group is None:
            return
        failure, culprit = "", -1
        try:
            if message.load or message.sends or message.receives:
                self._injector("repair")
            if message.load:
                self._held.clear()
                self._load_checkpoint(message.step)
                self._held = self._state.all_parts()
            receives = {part: (source, digest) for part, source, digest in message.receives}
            for part in sorted({part for part, _ in message.sends} | set(receives), key=plan.order):
                if part in receives:
                    culprit, digest = receives[part]
                    self._receive_part(part, culprit, digest, message.step)
                else:
                    culprit = -1
                    self._send_part(part, [target for name, target in message.sends if name == part])
        except Interrupted:
            return  # a Stop is on its way; a half-received state stays marked as not clean
        except (StateError, CheckpointError, ValueError, TypeError, KeyError) as error:
            failure = f"{type(error).__name__}: {error}"
        except RuntimeError as error:
            failure, culprit = f"{type(error).__name__}: {error}", -1
        self._processor.send(
            protocol.Repaired(
                generation=message.generation,
                ok=not failure,
                source=culprit if failure else -1,
                detail=failure,
                step=self._state.step,
            )
        )

    def _send_part(self, name: str, targets: list[int]) -> None:
        assert self._group is not None
        if name == protocol.STATE and self._injector.take_corruption():
            self._state.flip_bits()
        packed = codec.pack(self._state.parts[name].tree())
        repair.send_state(self._group, packed, [self._members.index(target) for target in targets])

    def _receive_part(self, name: str, source: int, digest: str, step: int) -> None:
        assert self._group is not None
        part = self._state.parts.get(name)
        if part is None:
            raise StateError(f"told to receive {name}, which this rank does not hold")
        # A copy of an earlier step may be the last one of that step, should the source fail: it stays until the new
        # one is there. Not so a newcomer's initial values, nor what differs from the copies that are right.
        keeps = not self._fresh and self._held.get(name, step) < step
        if not keeps:
            self._held.pop(name, None)
        received = repair.receive_state(self._group, self._members.index(source), None if keeps else part.core())
        tree = codec.unpack(received.skeleton, received.tensors)
        wrong = f"the {name} received from rank {source} has the wrong hash"
        part.check(tree)
        if keeps and codec.digest(part.core_of(tree)) != digest:
            raise StateError(wrong)
        self._held.pop(name, None)
        part.load(tree)
        if codec.digest(part.core()) != digest:
            raise StateError(wrong)
        self._held[name] = step

    def _load_checkpoint(self, step: int) -> None:
        if self._checkpoints is None:
            raise CheckpointError("there is no checkpoint directory")
        self._state.load_parts(self._checkpoints.load_parts(step, self._state.wanted))

    def _go(self) -> None:
        assert self._group is not None
        self.dealt = shares.deal(self.world_size, self._members)
        self.shares, self.rounds = self.dealt[self.rank], shares.rounds(self.world_size, self._members)
        carrier = next(rank for rank, carried in self.dealt.items() if 0 in carried)
        self._reducer.attach(self._group, self.world_size, self._members.index(carrier))
        if self._state.sharding is not None:
            self._state.sharding.attach(self._group)
        keeper.go()
        self._fresh, self._resume_due = False, True
        self._processor.entered(self._generation, self._state.step)
        self._state.forget_other_copies()
        self._broken = ""
        self._state.snapshot()
        self._on_go()
        self._out = False
        self._board.mark(activities.COMPUTE)

    def _dump(self, dump: protocol.Dump) -> None:
        try:
            if self._checkpoints is None:
                raise CheckpointError(
                    "there is no checkpoint directory: give Training one, or launch with --ft-checkpoint-dir"
                )
            self._checkpoints.wait()
            for part in dump.parts:
                if not self._has(part, dump.step):
                    raise CheckpointError(f"this rank has no clean copy of {part} of step {dump.step}")
            parts = {part: codec.pack(self._state.parts[part].tree()) for part in dump.parts}
            mark = hashlib.sha256(dump.mark.encode()).hexdigest()[:16]
            every, cut = self._state.every_part, self._state.cut
            path = self._checkpoints.save_parts(dump.step, parts, every, cut, mark, "dump")
        except (CheckpointError, OSError) as error:
            self._processor.send(protocol.Dumped(ok=False, step=dump.step, parts=dump.parts, detail=str(error)))
        else:
            self._processor.send(protocol.Dumped(ok=True, step=dump.step, parts=dump.parts, path=str(path or "")))

    def _abandon_group(self) -> None:
        if self._group is not None:
            self._reducer.attach(None)
            if self._state.sharding is not None:
                self._state.sharding.attach(None)
            keeper.leave()
            self._group = None

    def _on_broken(self, error: str) -> None:
        self._broken = error

    def _on_wait(self, waiting: bool) -> None:
        if self._out:
            return  # a repair: the controller has an eye on its time
        inside = activities.UPDATE if self.update_open else activities.COMPUTE
        self._board.mark(activities.COLLECTIVE if waiting else inside)

    def _exit(self, reason: str) -> NoReturn:
        """Leave at once. Interpreter shutdown could wait for threads that are stuck in an abandoned group."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(EXIT_TOLD)
