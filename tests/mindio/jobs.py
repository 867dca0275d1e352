"""Jobs of the example in examples/resumable, and a platform that a test leads.

Ranks are real processes, forked from a server that has torch loaded already: importing it takes seconds, a fork
milliseconds. The controller lives in the test's process, as it does in the platform's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evertrain.mindio.tft import api_controller, standbys
from evertrain.mindio.tft.runtime import runtime
from mindio_ttp import controller_ttp
from tests.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "resumable" / "train.py"
WORLD = 4
PATIENCE = 120.0
PACE = "pace"
_context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Make the server of processes ready; before the first test, so that none of them is charged for it."""
    _context.set_forkserver_preload(["tests.mindio.warm"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # else the server would not find what it is to load
    try:
        process = _context.Process(target=_check_warm)
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0, "the server has not loaded the example"
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _check_warm() -> None:
    assert "tests.mindio.warm" in sys.modules


def load_example() -> Any:
    found = sys.modules.get("mindio_example")
    if found is None:
        spec = importlib.util.spec_from_file_location("mindio_example", EXAMPLE)
        assert spec is not None and spec.loader is not None
        found = sys.modules["mindio_example"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


class Gate:
    """Who opens an Event waits for all who waited for it to wake up, for ever if one of them has died. Not so here."""

    def __init__(self) -> None:
        self._opened = _context.Semaphore(0)

    def wait(self, seconds: float) -> None:
        if self._opened.acquire(timeout=seconds):
            self._opened.release()  # for the next one

    def set(self) -> None:
        self._opened.release()


def _run_rank(arguments: list[str], environment: dict[str, str], output: str, gates: dict[str, Gate]) -> None:
    """In a new process: what `python examples/resumable/train.py` does."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.update(environment)
    example = load_example()
    for name, gate in gates.items():
        example.FAULTS[name] = lambda job, gate=gate: gate.wait(PATIENCE)
    for kind in ("uce", "network"):
        example.FAULTS[f"{kind}-together"] = _together(example.FAULTS[kind])
        example.FAULTS[f"{kind}-stopped"] = _when_stopped(example.FAULTS[kind])
    example.FAULTS["lose-controller"] = lose_controller
    example.FAULTS["cut"] = _cut_network
    example.Job.inject = _paced(example.Job.inject)
    if environment.get("TEST_AWAIT_STANDBYS"):
        example.Job.inject = _knowing_the_standbys(example.Job.inject)
    if patience := environment.get("TEST_PATIENCE"):
        example.Collectives.__init__ = functools.partialmethod(example.Collectives.__init__, patience=float(patience))
    if environment["RANK"] == environment.get("TEST_CLEAN_FAILS_ON"):
        example.Collectives.clean = lambda *_: 1
    if environment["RANK"] == "0" and (moment := environment.get("TEST_LOSE_CONTROLLER_IN")):
        owner = example.Job if hasattr(example.Job, moment) else example.Collectives
        _lose_controller_in(owner, moment)
    rank, _, moment = environment.get("TEST_DIES_IN", "").partition(":")
    if environment["RANK"] == rank:
        setattr(example.Job, moment, _die)
    if moment := environment.get("TEST_HOLDS_IN"):
        setattr(example.Job, moment, _hold)
    if environment.get("TEST_FAULT_IN_UPDATE"):
        _fault_in_update(example, environment["RANK"], int(environment["TEST_FAULT_IN_UPDATE"]))
    sys.argv = [str(EXAMPLE), *arguments]
    example.main()


def _paced(inject: Callable[[Any], None]) -> Callable[[Any], None]:
    """Not beyond the step that the test allows, if it says anything about it."""

    def paced(job: Any) -> None:
        pace = job.directory / PACE
        while pace.exists() and job.step >= int(pace.read_text()):
            time.sleep(0.01)
        inject(job)

    return paced


def _knowing_the_standbys(inject: Callable[[Any], None]) -> Callable[[Any], None]:
    """Nobody does a step, and nothing happens, before every rank knows where to go when the controller is lost."""
    known = False

    def led(job: Any) -> None:
        nonlocal known
        if not known:
            until(lambda: len(runtime.processor._standbys) == standbys.COUNT, "the addresses of the standbys")
            known = True
        inject(job)

    return led


def _together(fault: Callable[[Any], None]) -> Callable[[Any], None]:
    """Not before every rank is at its fault that has one in this step. Nobody is stopped between that and the fault, so
    none of them can be repaired first, however long another one takes from here to its report."""

    def faulted(job: Any) -> None:
        runtime.shield(True)  # until the training function is left
        job.directory.joinpath(f"at-fault.{job.step}.{job.rank}").touch()
        others = [rank for step, rank, _ in (each.split(":") for each in job.options.fault) if int(step) == job.step]
        files = [job.directory / f"at-fault.{job.step}.{rank}" for rank in others]
        until(lambda: all(file.exists() for file in files), "the other ranks with a fault")
        fault(job)

    return faulted


def _when_stopped(fault: Callable[[Any], None]) -> Callable[[Any], None]:
    """After the others' faults were found and it was decided what to do about them: when this rank is being stopped."""

    def stopped(job: Any) -> None:
        assert job.collectives._stopped.wait(PATIENCE), "waited too long for the stop"
        fault(job)

    return _together(stopped)


def _hold(job: Any, *_: Any) -> None:
    """As long as it takes the test to kill this process."""
    job.note("held")
    time.sleep(PATIENCE)


def _die(job: Any, *_: Any) -> None:
    """When another rank has begun to save as well, so that there is something to do again."""
    until(lambda: any("save" in file.read_text() for file in job.directory.glob("events.*")), "another saver")
    os.kill(os.getpid(), signal.SIGKILL)


def _fault_in_update(example: Any, rank: str, step: int) -> None:
    """Rank 3 dies in the update of this step when two others have done theirs; rank 1 is still at it when all stop."""
    update, job = example.Shards.update, None

    def known(original: Any) -> Any:
        def register(its: Any) -> None:
            nonlocal job
            job = its
            original(its)

        return register

    def late(shards: Any, gradient: Any) -> None:
        if rank in "13" and job.step + 1 == step and not job.directory.joinpath("faulted." + rank).exists():
            job.directory.joinpath("faulted." + rank).touch()
            if rank == "3":
                files = [job.directory / f"steps.{other}" for other in "02"]
                until(lambda: all(f"[{step}, " in file.read_text() for file in files), "the updates of others")
                os.kill(os.getpid(), signal.SIGKILL)
            until(lambda: runtime.processor.steps.lock_step == step, "the lock of the step")
        update(shards, gradient)

    example.register, example.Shards.update = known(example.register), late


def lose_controller(_: Any = None) -> None:
    """The controller of this process vanishes without a word, as if its process had; the training does not."""
    controller = api_controller._controller
    api_controller._controller = None

    def vanish() -> None:
        for link in list(controller._links.values()):
            link._transport.abort()
        controller._listener.close()
        controller._links.clear()
        controller._loop.stop()

    controller._loop.call_soon_threadsafe(vanish)


def _lose_controller_in(owner: type, moment: str) -> None:
    """The controller vanishes while this rank carries out one of its orders."""
    original = getattr(owner, moment)

    def callback(self: Any, *args: Any) -> Any:
        if api_controller._controller is not None:
            lose_controller()
        return original(self, *args)

    setattr(owner, moment, callback)


def _cut_network(job: Any) -> None:
    """The connections of this rank's groups break; every process lives."""
    for group in job.collectives._groups:
        group.backend.stop(group._raw)


class Job:
    def __init__(self, directory: Path, port: int, *arguments: str, platform: bool, steps: int = 30) -> None:
        self.directory = directory
        self.port = port
        self.arguments = ["--dir", str(directory), "--steps", str(steps), *arguments]
        self.platform = platform
        self.gates: dict[str, Gate] = {}
        self.processes: dict[int, Any] = {}
        self._all: list[Any] = []
        self.environment: dict[str, str] = {}

    def gate(self, name: str) -> Gate:
        """Something that a rank waits for: a fault of this kind."""
        self.gates[name] = Gate()
        return self.gates[name]

    def start(self, *ranks: int, **environment: str) -> None:
        for rank in ranks or range(WORLD):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1",
                "TTP_PORT": str(self.port),
                "TTP_LOG_PATH": str(self.directory / "logs"),
                "OMP_NUM_THREADS": "1",
                **({"MINDX_TASK_ID": "a-job"} if self.platform else {}),
                **self.environment,
                **environment,
            }
            output = str(self.directory / f"output.{rank}")
            process = _context.Process(target=_run_rank, args=(self.arguments, variables, output, self.gates))
            process.start()
            self.processes[rank] = process
            self._all.append(process)

    def allow(self, step: int) -> None:
        """Train up to here; after the first word about it, training waits for the next."""
        new = self.directory / f"{PACE}.new"
        new.write_text(str(step))
        new.rename(self.directory / PACE)

    def wait_told_to_halt(self, step: int) -> None:
        """Until all ranks know that they are to halt at the end of this step: only then they may go there."""
        line = f"training is to halt at the end of step {step}\n"
        logs = self.directory / "logs"
        until(lambda: sum(line in file.read_text() for file in logs.glob("*")) == WORLD, f"the order to halt at {step}")

    def wait_at_another_controller(self) -> None:
        """Until all ranks have found the one that leads now."""
        line, logs = "registered with the controller", self.directory / "logs"
        until(lambda: sum(line in file.read_text() for file in logs.glob("*")) == WORLD, "all to find the standby")

    def wait(self, codes: tuple[int, ...] = (0,)) -> None:
        deadline = time.monotonic() + PATIENCE
        for rank, process in sorted(self.processes.items()):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode in codes, f"rank {rank} ended with {process.exitcode}:\n{self.story()}"

    def close(self) -> None:
        for process in self._all:
            if process.is_alive():
                process.kill()
            process.join(PATIENCE)
            process.close()

    def story(self) -> str:
        files = sorted(self.directory.glob("output.*")) + sorted(self.directory.glob("logs/*"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    # What became of it.

    def results(self) -> dict[int, dict]:
        found = {}
        for rank in range(WORLD):
            lines = (self.directory / f"output.{rank}").read_text().splitlines()
            last = [json.loads(line) for line in lines if line.startswith('{"rank"')]
            if last:
                found[rank] = last[-1]
        return found

    def steps(self) -> dict[int, dict[int, list]]:
        """For every step, what each rank says of it: samples, loss, weights before. Written once the step counts."""
        found: dict[int, dict[int, list]] = {}
        for rank in range(WORLD):
            with contextlib.suppress(FileNotFoundError):
                for line in (self.directory / f"steps.{rank}").read_text().splitlines():
                    step, *rest = json.loads(line)
                    found.setdefault(step, {})[rank] = rest
        return found

    def times(self) -> int:
        """How many step records there are: more than ranks times steps if a step was done twice."""
        files = self.directory.glob("steps.*")
        return sum(len(file.read_text().splitlines()) for file in files)

    def callbacks(self) -> Counter[str]:
        """How often each callback ran, over all ranks."""
        return sum((self.callbacks_of(rank) for rank in range(WORLD)), Counter())

    def callbacks_of(self, rank: int) -> Counter[str]:
        try:
            lines = (self.directory / f"events.{rank}").read_text().splitlines()
        except FileNotFoundError:
            return Counter()
        return Counter(line.split()[0] for line in lines)


class Platform:
    """The cluster's side: it gets the controller's reports and says what is to be done."""

    def __init__(self, port: int) -> None:
        self._reports: queue.Queue[tuple] = queue.Queue()
        for name in api_controller.REPORTS:
            controller_ttp.tft_register_mindx_callback(name, self._noting(name))
        controller_ttp.tft_init_controller(-1, WORLD, False, True, True)
        controller_ttp.tft_start_controller("127.0.0.1", port, False, "")

    def _noting(self, name: str) -> Callable[..., int]:
        def report(*args: Any) -> int:
            self._reports.put((name, *args))
            return 0

        return report

    def next(self, name: str) -> tuple:
        """The next report, which must be of this name; its arguments."""
        got, *args = self._reports.get(timeout=PATIENCE)
        assert got == name, (got, args)
        return tuple(args)

    def any(self) -> tuple:
        """The next report, whatever it is: its name and its arguments."""
        return self._reports.get(timeout=PATIENCE)

    def agree(self, faults: dict[int, int], choice: str, params: str = "") -> list[str]:
        """From the first report of a fault to the choice of a strategy. Returns what was offered."""
        found, _ = self.next("report_fault_ranks")
        assert found == faults
        assert controller_ttp.tft_notify_controller_stop_train({}, "stop") == 0
        code, _, _ = self.next("report_stop_complete")
        assert code == 0
        return self.choose(faults, choice, params)

    def choose(self, faults: dict[int, int], choice: str, params: str = "") -> list[str]:
        assert controller_ttp.tft_notify_controller_on_global_rank(faults, 30) == 0
        _, offered = self.next("report_strategies")
        assert controller_ttp.tft_notify_controller_change_strategy(choice, params) == 0
        return offered

    @property
    def state(self) -> str:
        return api_controller._controller.machine.state

    def wait_state(self, state: str) -> None:
        until(lambda: self.state == state, f"the controller to be in state {state}, not {self.state}")


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def job(directory: Path, *arguments: str, **options: Any) -> Iterator[Job]:
    """Without a platform: rank 0 hosts the controller."""
    directory.mkdir(exist_ok=True)
    made = Job(directory, free_port(), *arguments, platform=False, **options)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def led_job(directory: Path, *arguments: str, **options: Any) -> Iterator[tuple[Job, Platform]]:
    directory.mkdir(exist_ok=True)
    made = Job(directory, free_port(), *arguments, platform=True, **options)
    try:
        yield made, Platform(made.port)
    finally:
        made.close()
        controller_ttp.tft_destroy_controller()
        api_controller._callbacks.clear()
