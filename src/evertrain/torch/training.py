"""The few lines that a PyTorch user adds.

    training = Training(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)

    @training.resilient
    def train():
        for step, batch in training.steps(loader, until=1000):
            loss = training.model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

Under `evertrain launch` the function is left and called again when something breaks, with model, optimizer, data
position and random numbers back where the step began. Everywhere else the same script trains normally.

Random numbers are reseeded at each step from (seed, rank, step), with and without the launcher. That makes a step's
randomness a function of its place in the run: it survives the process that drew it, and it is the same when the step
is run again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from evertrain.mindio import board as activities
from evertrain.mindio import faultspec
from evertrain.mindio.board import FAULT_BOARD_FD, Board, FaultBoard
from evertrain.torch import codec, link, parking, rng
from evertrain.torch.checkpoint import CheckpointError
from evertrain.torch.data import Feed
from evertrain.torch.default_group import check_torch
from evertrain.torch.errors import NO_STEPS, NOT_RESILIENT, UsageError
from evertrain.torch.fsdp import FullySharded, StepAside, is_fully_sharded
from evertrain.torch.inject import Injector
from evertrain.torch.interrupt import Interrupter
from evertrain.torch.part_checkpoints import PartCheckpoints
from evertrain.torch.reducer import Reducer, Replica
from evertrain.torch.rounds import Feeds, Rounds, passes
from evertrain.torch.session import Session
from evertrain.torch.sharded import Sharding
from evertrain.torch.state import TrainingState
from evertrain.torch.unprotected import Unprotected

P = ParamSpec("P")
T = TypeVar("T")


class MicroBatches(list[Any]):
    """The batches of one step with gradient accumulation."""


class Training:
    """Everything of a run that has to survive.

    Args:
        model: the bare module; `training.model` is its data-parallel form. Don't wrap it in DistributedDataParallel.
            Or a module that `fully_shard` was applied to, which `training.model` is then, too.
        optimizer: a torch optimizer, or several.
        scheduler: anything with `state_dict`, for example a learning rate scheduler; or several.
        sampler: the loader's sampler; its `set_epoch` is called at each epoch.
        scaler: a `torch.amp.GradScaler`.
        extra: further objects with `state_dict` and `load_state_dict`, by name; they must be the same on all ranks.
        seed: seed of the random numbers; by default the one of `torch.manual_seed`. Rank 0's counts for all.
        checkpoint_dir: where periodic and dying-gasp checkpoints go, and where a start looks for the newest one.
        checkpoint_every: steps between periodic checkpoints; 0 for what the launcher was told, by default none.
        keep: how many checkpoints are kept.
        sharded: cut the optimizer's state into shards (ZeRO-1). Each rank updates one, the weights are then gathered.
        replica_cnt: how many ranks hold each shard; the number of ranks must be a multiple of it.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        sampler: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | Sequence[Any] | None = None,
        seed: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 0,
        keep: int = 3,
        sharded: bool = False,
        replica_cnt: int = 2,
    ) -> None:
        parking.wait_for_rank()
        if link.is_launched():
            link.open_link()  # from here on the controller knows that the script trains, and whose mistake an exit is
            check_torch()
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(link.NO_DDP)
        checkpoint_every = checkpoint_every or int(os.environ.get("EVERTRAIN_CHECKPOINT_EVERY", "0"))
        if checkpoint_every < 0:
            raise UsageError(f"checkpoint_every must not be negative: {checkpoint_every}")
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        directory = checkpoint_dir or os.environ.get("EVERTRAIN_CHECKPOINT_DIR")
        if checkpoint_every and not directory:
            raise UsageError("checkpoint_every needs a checkpoint_dir (or `evertrain launch --ft-checkpoint-dir`)")
        self._every = checkpoint_every
        seed = torch.initial_seed() if seed is None else seed
        self._state = TrainingState(model, optimizer, scheduler, scaler, extra, seed)
        self._checkpoints = self._open(Path(directory), keep) if directory else None
        self._feeds = Feeds(self._state, sampler, self.rank, self.world_size)
        self._calls = 0
        self._board = link.board()
        self._inject = _injector(self.rank, self._board)
        self.model: Any
        self._reducer: Reducer | StepAside
        if is_fully_sharded(model):
            self._reducer, self.model = self._step_aside(model, sharded), model
        else:
            if sharded:
                self._state.shard(
                    Sharding(self._state.optimizers, self.rank, self.world_size, replica_cnt, self._inject)
                )
            self._reducer = Reducer(model, faults=self._inject)
            self.model = Replica(model, self._reducer, faults=self._inject)
        self._reducer.may_train = False
        self._stepping = False
        self._rounds = Rounds(self._state, self._reducer)
        self._running = False
        self._runner: Session | Unprotected
        if link.is_launched():
            self._runner = self._protected()
        else:
            self._runner = Unprotected(self.rank, self.world_size, self._state, self._reducer, self._board)
        for item in self._state.optimizers:
            item.register_step_pre_hook(self._before_update)
            if self._state.sharding is not None:
                item.register_step_post_hook(self._after_update)

    def _step_aside(self, model: torch.nn.Module, sharded: bool) -> StepAside:
        if sharded:
            raise UsageError("fully_shard has sharded the optimizer's state already: leave sharded=True out")
        if self._state.scaler is not None:
            raise UsageError("a GradScaler does not see the other shards of a gradient: use bfloat16, or no scaler")
        aside = StepAside(model, faults=self._inject)
        sharding = FullySharded(model, self._state.optimizers, aside)
        self._state.shard(sharding)
        if sharding.copies == 1 and self.rank == 0:
            print(
                "evertrain: the mesh has no replicas: if a rank is lost, all load the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
        return aside

    def _protected(self) -> Session:
        processor, welcome = link.open_link()
        session = Session(
            processor=processor,
            rank=self.rank,
            world_size=self.world_size,
            timing=link.timing(),
            board=self._board,
            state=self._state,
            reducer=self._reducer,
            injector=self._inject,
            interrupter=Interrupter(),
            checkpoints=self._checkpoints,
            on_go=self._on_go,
            can_share=lambda: self._feeds.can_be_shared and len(self._state.parts) == 1,
        )
        processor.on_stop = session.stop_now
        self._running = welcome.running
        return session

    # What the user calls.

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._state.step

    def resilient(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorator: the function may be left at any point and called again, from the step where it was."""

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            if self._checkpoints is not None and not self._running and self._state.step == 0:
                self._load_newest(self._checkpoints)
            self._state.new_run()
            self._reducer.prepare()
            self._state.snapshot()

            def call() -> T:
                self._calls, self._stepping = 0, False
                self._reducer.may_train = True
                try:
                    return function(*args, **kwargs)
                finally:
                    self._reducer.may_train = False

            return self._runner.run(call, self._finish_step)

        return wrapper

    def steps(self, loader: Iterable[Any], until: int, *, accumulate: int = 1) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) until that many steps are complete; the end of the body completes a step.

        With `accumulate` above 1 a step has that many batches; go through them with `micro`.

        While ranks are missing (`--ft-elastic`), a step may be yielded several times, with the batches of other ranks;
        only the last pass updates the weights (`completes_step`).
        """
        if accumulate < 1:
            raise UsageError(f"accumulate must be at least 1: {accumulate}")
        if not self._reducer.may_train:
            raise UsageError(NOT_RESILIENT)
        return self._go_through(loader, until, accumulate)

    def _go_through(self, loader: Iterable[Any], until: int, accumulate: int) -> Iterator[tuple[int, Any]]:
        self._stepping = True
        name, self._calls = str(self._calls), self._calls + 1
        work = self._runner
        feeds = self._feeds.open(name, loader, work.shares)
        *partial, (last, _) = passes(work)
        while self._state.step < until:
            step = self._inject.step = self._state.step
            if self._every:
                self._checkpoint(step)
            self._inject("data")
            for share, counts in partial:
                with self._rounds.partial(counts):
                    yield step, self._batch(feeds[share], share, step, accumulate)
                if not counts:
                    feeds[share].seek(*feeds[share].position)  # the script may have written into the batch
            yield step, self._batch(feeds[last], last, step, accumulate)
            self._finish_step()
        if self._every:
            self._checkpoint(self._state.step)

    def _batch(self, feed: Feed, share: int, step: int, count: int) -> Any:
        self._board.mark(activities.DATA)
        batches = feed.take(count)
        self._board.mark(activities.COMPUTE)
        rng.reseed(self._state.seed, rng.STEP, share, step)
        return batches[0] if count == 1 else MicroBatches(batches)

    @property
    def completes_step(self) -> bool:
        """False while this rank goes through the data of a missing one and will be handed more for the same step."""
        return self._rounds.completes_step

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensors of all ranks, stacked in order of rank, in the pass that completes the step; None before it.

        Call it before the update, like any collective. Unlike your own ones it has a row for every rank, also for a
        missing one: from whoever does its work.
        """
        return self._rounds.gather(tensor, self._runner, self.world_size)

    def micro(self, batches: Any) -> Iterator[Any]:
        """Go through a step's batches; gradients are exchanged between ranks on the last one only."""
        if not isinstance(batches, MicroBatches):
            yield batches
            return
        for batch in batches[:-1]:
            with self._reducer.no_sync():
                yield batch
        yield batches[-1]

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """The state_dict() of the whole optimizer; of several, say which one. If it is sharded, a collective: every
        rank calls it, in `train`."""
        known = self._state.optimizers
        if optimizer is None and len(known) > 1:
            raise UsageError("there are several optimizers: training.optimizer_state_dict(optimizer) says which one")
        if optimizer is not None and not any(optimizer is each for each in known):
            raise UsageError("that optimizer was not given to Training")
        if isinstance(self._state.sharding, Sharding):
            return self._state.sharding.gather_state_dict()
        return (optimizer or known[0]).state_dict()

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Announce something that takes much longer than a step, so that it is not taken for a hang."""
        self._board.slow(+1)
        try:
            yield
        finally:
            self._board.slow(-1)

    # What happens in a step.

    def _before_update(self, optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        sharding = self._state.sharding
        if isinstance(sharding, FullySharded):
            return self._before_full_update(sharding)
        self._check_place()
        if sharding is not None and (any(args[1:]) or options.get("closure") is not None):
            raise UsageError("optimizer.step() of a sharded optimizer takes no closure: call backward() before it")
        self._runner.begin_update()
        self._inject("optimizer")
        if sharding is not None:
            sharding.begin(self._state.step)

    def _before_full_update(self, sharding: FullySharded) -> None:
        if sharding.catching_up:
            return  # out of user code: the update of a step that others have completed
        self._check_place()
        self._runner.begin_update()
        sharding.begin(self._state.step)
        self._inject("optimizer")

    def _check_place(self) -> None:
        """An update that no step is counted for would be lost, or made on one rank only, and nobody would notice."""
        if not self._stepping or not self._reducer.may_train:
            raise UsageError(NO_STEPS if self._reducer.may_train else NOT_RESILIENT)

    def _after_update(self, *_: Any) -> None:
        assert self._state.sharding is not None
        self._state.sharding.finish()

    def _finish_step(self) -> None:
        self._runner.end_step(self._advance)

    def _advance(self) -> None:
        self._state.step += 1
        self._feeds.commit()
        self._rounds.end_step()
        self._state.snapshot()

    def _on_go(self) -> None:
        """A new generation begins: everything that hangs on the step goes to where the state is now."""
        self._running = True
        self._rounds.reset()

    # Checkpoints.

    def _open(self, directory: Path, keep: int) -> PartCheckpoints:
        try:
            return PartCheckpoints(directory, keep, on_result=self._on_checkpoint)
        except CheckpointError as error:
            raise UsageError(str(error)) from error  # told once for all ranks

    def _checkpoint(self, step: int) -> None:
        if step == 0 or step % self._every or self._checkpoints is None:
            return
        names = self._state.writes(self._runner.is_first)
        if names and step not in self._checkpoints.steps():
            parts = {name: codec.pack(self._state.parts[name].tree()) for name in names}
            # All ranks have the same weights, so this is a name for the content that needs no agreement.
            mark = codec.digest(self._state.core())[:16] if len(self._state.every_part) > 1 else ""
            self._checkpoints.save_parts_async(step, parts, self._state.every_part, self._state.cut, mark)
        self._inject("checkpoint")

    def _load_newest(self, checkpoints: PartCheckpoints) -> None:
        found = checkpoints.load_newest_parts(self._state.wanted)
        if found is not None:
            step, trees = found
            self._state.load_parts(trees)
            if self.rank == 0:
                print(f"evertrain: resuming from the checkpoint of step {step}", file=sys.stderr, flush=True)

    def _on_checkpoint(self, step: int, path: Path | None, error: Exception | None) -> None:
        if error is not None:
            print(f"evertrain: warning: no checkpoint of step {step}: {error}", file=sys.stderr, flush=True)
        if path is not None or error is not None:  # neither: parts that others write are still missing
            self._runner.log("checkpoint", step=step, path=str(path or ""), error=str(error or ""))


def _injector(rank: int, board: Board) -> Injector:
    text = os.environ.get("EVERTRAIN_FAULTS")
    fd = os.environ.get(FAULT_BOARD_FD)
    faults = faultspec.decode(text) if text else []
    return Injector(faults, rank, FaultBoard(fd=int(fd)) if fd and faults else None, board)
