"""What we need of torch and torchrun beyond their public interface. The only file that touches it.

torchrun keeps the processes of a node in one context that ends them all when one fails. Ours has a context for each, so
that one can be replaced while the others live. Everything else stays torchrun's: rendezvous, environment, log files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch

from evertrain.taskd.agent import known_torch
from evertrain.taskd.agent.meeting import LOOK, PatientStore, answers, free_port, hosts_store

try:
    import torch.distributed.elastic.agent.server.local_elastic_agent as local_agent
    import torch.distributed.launcher.api as launcher
    from torch.distributed import DistError, PrefixStore, TCPStore, distributed_c10d
    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, Worker, WorkerState
    from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import (
        RendezvousError,
        RendezvousInfo,
        RendezvousStoreInfo,
        dynamic_rendezvous,
    )
    from torch.utils.data import dataloader
except ImportError as error:
    raise known_torch.lacking(torch.__version__, [f"a name ({error})"]) from error

UNLIMITED = 32767
_GRACE = 30
_MEETING_LIMIT = 300.0
_TRY = timedelta(seconds=10)
"""For a connection to a store that listens."""

_start_processes = local_agent.start_processes
_popen = getattr(SubprocessHandler, "_popen", None)
_delay = getattr(dynamic_rendezvous, "_delay", None)

Terminated = SignalException
"""Raised in torchrun's main thread by SIGTERM and the like; `sigval` is the signal."""
Take = Callable[[Sequence[str], Mapping[str, str], Any, Any], "subprocess.Popen[bytes] | None"]
"""A process for a command, its environment and the files of its output; None if torchrun has to start one."""
log = logging.getLogger(__name__)


class Unmet(Exception):
    """The agents of the other nodes are not there."""


_NEEDED: dict[str, tuple[object, tuple[str, ...]]] = {
    "SimpleElasticAgent": (
        SimpleElasticAgent,
        ("_invoke_run", "_initialize_workers", "_assign_worker_ranks", "_exit_barrier"),
    ),
    "LocalElasticAgent": (local_agent.LocalElasticAgent, ("_start_workers", "_shutdown")),
    "local_elastic_agent": (local_agent, ("start_processes",)),
    "launcher.api": (launcher, ("launch_agent",)),
    "WorkerState": (WorkerState, ("SUCCEEDED", "HEALTHY")),
    "SubprocessHandler": (SubprocessHandler, ("_popen",)),
    "SubprocessContext": (SubprocessContext, ("wait", "close", "pids")),
    "dynamic_rendezvous": (dynamic_rendezvous, ("_delay", "_RendezvousExitOp")),
    "DynamicRendezvousHandler": (
        dynamic_rendezvous.DynamicRendezvousHandler,
        ("next_rendezvous", "_stop_heartbeats", "_get_deadline"),
    ),
}
_PARAMETERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "start_processes": (
        local_agent.start_processes,
        ("name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes", "start_method"),
    ),
    "RendezvousInfo": (RendezvousInfo, ("store", "rank", "world_size", "bootstrap_store_info")),
    "RendezvousStoreInfo": (RendezvousStoreInfo, ("master_addr", "master_port")),
    "Worker": (Worker, ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")),
}
"""What we hand over by name."""


def check() -> None:
    """Is everything there that we touch? UnknownTorch if not."""
    missing = [
        f"{name}.{part}" for name, (owner, parts) in _NEEDED.items() for part in parts if not hasattr(owner, part)
    ]
    for name, (function, wanted) in _PARAMETERS.items():
        known = inspect.signature(function).parameters
        missing += [f"{name}(..., {each}=...)" for each in wanted if each not in known]
    if missing:
        raise known_torch.lacking(torch.__version__, missing)


def unread() -> str | None:
    """What to say about a torch whose source nobody has read; None if it is a known one."""
    return known_torch.unread(torch.__version__)


def patch(invoke_run: Callable[[SimpleElasticAgent, str, Callable[..., RunResult]], RunResult]) -> None:
    """Have `invoke_run(agent, role, original)` called where torchrun runs its processes. Once."""
    original = SimpleElasticAgent._invoke_run
    if getattr(original, "_taskd", False):
        return
    check()

    def ours(self: SimpleElasticAgent, role: str = "default") -> RunResult:
        return invoke_run(self, role, original)

    setattr(ours, "_taskd", True)  # noqa: B010
    SimpleElasticAgent._invoke_run = ours


def launch_as_pod(stand_by: Callable[[Sequence[str], int], str]) -> None:
    """What a job of the cluster means by torchrun's options.

    `--max_restarts` is how many faults it may have; without it, as many as there are. Pods may share a machine. And a
    pod may stand by: it learns only now which node of the job it is.
    """
    original = launcher.launch_agent
    if getattr(original, "_taskd", False):
        return

    def launch_agent(config: Any, entrypoint: Any, arguments: Any, *args: Any, **kwargs: Any) -> Any:
        if config.max_restarts == 0:
            config.max_restarts = UNLIMITED
        if rank := stand_by((str(entrypoint), *map(str, arguments)), config.nproc_per_node):
            os.environ["RANK"] = rank
            if config.rdzv_backend == "static":
                config.rdzv_configs["rank"] = int(rank)
        host = hosts_store(config.rdzv_endpoint, os.environ.get("POD_IP", ""), os.environ.get("RANK", ""))
        if config.rdzv_backend == "c10d" and host is not None:
            config.rdzv_configs.setdefault("is_host", host)
        return original(config, entrypoint, arguments, *args, **kwargs)

    setattr(launch_agent, "_taskd", True)  # noqa: B010
    launcher.launch_agent = launch_agent


def is_agent(something: object) -> bool:
    """Whether it is what torchrun calls its agent."""
    return isinstance(something, SimpleElasticAgent)


@dataclass(frozen=True)
class Group:
    """A process group of the training."""

    group: Any
    name: str
    ranks: list[int]
    """In the order of their ranks in the group."""
    is_default: bool


def process_groups() -> list[Group]:
    """All that this process knows; torch has no list of them."""
    world = distributed_c10d._world
    return [
        Group(group, world.pg_names[group], list(world.pg_group_ranks[group]), group is world.default_pg)
        for group in list(world.pg_map)
    ]


def hccl_name(group: Any, rank: int) -> str | None:
    """The name of the group's communicator; None if it isn't HCCL's."""
    try:
        return str(group._get_backend(torch.device("npu")).get_hccl_comm_name(rank))
    except (AttributeError, RuntimeError):
        return None


def data_iterator() -> type[Any]:
    """What every iterator over a DataLoader is derived from, with its `__next__`. UnknownTorch if there is no such."""
    found = getattr(dataloader, "_BaseDataLoaderIter", None)
    if "__next__" not in vars(found or object):
        part = "_BaseDataLoaderIter" + ("" if found is None else ".__next__")
        raise known_torch.lacking(
            torch.__version__,
            [f"torch.utils.data.dataloader.{part}"],
            "timings of the loading of data can't be taken",
        )
    return cast(type[Any], found)


_TOLD, _TIMED = "_get_ddp_logging_data", "_set_ddp_runtime_logging_sample_rate"
_SELDOM = 100
"""Iterations of which torch takes the times of one, unless it is told otherwise."""


def timed_ddp() -> type[Any]:
    """DistributedDataParallel, for the two functions below. UnknownTorch if it does not tell its times."""
    found = torch.nn.parallel.DistributedDataParallel
    if missing := [each for each in (_TOLD, _TIMED) if not hasattr(found, each)]:
        names = [f"torch.nn.parallel.DistributedDataParallel.{each}" for each in missing]
        raise known_torch.lacking(torch.__version__, names, "timings of what it exchanges can't be taken")
    return cast(type[Any], found)


def time_exchanges(ddp: Any, each: bool) -> None:
    getattr(ddp, _TIMED)(1 if each else _SELDOM)


def last_exchange(ddp: Any) -> tuple[int, int]:
    """When the last timed exchange of gradients began and ended, in ns since 1970. Zeros if none was: not on devices
    for which torch has no clock."""
    told = getattr(ddp, _TOLD)()
    return told.get("backward_comm_time_start", 0), told.get("backward_comm_time_end", 0)


@dataclass
class _OneRank:
    """What torch asks for log files, for a context with one process."""

    destinations: Any

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        return self.destinations


@dataclass
class Processes:
    """In the place of torch's context of all processes of the node: one context each."""

    common: dict[str, Any]
    args: dict[int, tuple[Any, ...]]
    envs: dict[int, dict[str, str]]
    destinations: Any
    prefixes: dict[int, str]
    contexts: dict[int, Any] = field(default_factory=dict)
    """By local rank."""
    replaced: dict[int, int] = field(default_factory=dict)
    """By local rank: how often."""

    def start(self, local_rank: int, extra: dict[str, str], take: Take | None) -> int:
        """Its process id."""
        env = {**self.envs[local_rank], **extra}
        destination = self._destination(local_rank)
        if 0 in destination.error_files:
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[0]
        with _started_by(take):
            self.contexts[local_rank] = _start_processes(
                **self.common,
                args={0: self.args[local_rank]},
                envs={0: env},
                logs_specs=_OneRank(destination),
                log_line_prefixes={0: self.prefixes[local_rank]},
            )
        return self.pids()[local_rank]

    @property
    def command(self) -> tuple[str, ...]:
        """Of one of the processes; empty if they are none that a spare could become."""
        entrypoint = self.common["entrypoint"]
        # A process that is bound to a part of the machine is bound when it is started.
        if not isinstance(entrypoint, str) or self.common.get("numa_options") is not None or not self.args:
            return ()
        return (entrypoint, *map(str, next(iter(self.args.values()))))

    def _destination(self, local_rank: int) -> Any:
        """A replacement writes beside its predecessor's files, not over them."""
        times = self.replaced.get(local_rank, 0)

        def own(value: Any) -> Any:
            if isinstance(value, dict):
                return {0: _beside(value[local_rank], times)} if local_rank in value else {}
            return f"{value}.{local_rank}" if isinstance(value, str) and value != os.devnull else value

        return dataclasses.replace(
            self.destinations,
            **{each.name: own(getattr(self.destinations, each.name)) for each in dataclasses.fields(self.destinations)},
        )

    def stop(self, local_ranks: Collection[int]) -> None:
        """At once, and until they are gone."""
        for context in self.kill(local_ranks):
            context.close(signal.SIGKILL, _GRACE)

    def kill(self, local_ranks: Iterable[int]) -> list[Any]:
        contexts = [self.contexts[each] for each in local_ranks if each in self.contexts]
        for context in contexts:
            for pid in context.pids().values():
                _kill(context, pid)
        return contexts

    def code(self, local_rank: int) -> int | None:
        """Its exit code; None while it runs."""
        context = self.contexts[local_rank]
        if isinstance(context, SubprocessContext):
            code = next(iter(context.subprocess_handlers.values())).proc.poll()
            return None if code is None else int(code)
        result = context.wait(0)
        if result is None:
            return None
        failure = next(iter(result.failures.values()), None)
        return int(failure.exitcode) if failure is not None else 0

    # What torch itself calls.

    def pids(self) -> dict[int, int]:
        return {rank: pid for rank, context in self.contexts.items() for pid in context.pids().values()}

    def close(self, death_sig: signal.Signals | None = None, timeout: int = _GRACE) -> None:
        """All at the same time: each may take as long to end as torchrun grants."""
        if self.contexts:
            with ThreadPoolExecutor(len(self.contexts)) as pool:
                list(pool.map(lambda context: context.close(death_sig, timeout), self.contexts.values()))


@contextlib.contextmanager
def _started_by(take: Take | None) -> Iterator[None]:
    """Let torchrun's processes come from there instead of being started."""

    def popen(self: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        process = take(args, env, self._stdout, self._stderr) if take is not None else None
        return process if process is not None else _popen(self, args, env)  # type: ignore[misc]

    SubprocessHandler._popen = popen
    try:
        yield
    finally:
        SubprocessHandler._popen = _popen


@contextlib.contextmanager
def _as_it_is(local_rank: int) -> Iterator[None]:
    """What torchrun says about a process has its rank on the node, not that in its context, where it is alone."""

    def corrected(record: logging.LogRecord) -> bool:
        if "local_rank: %s" in str(record.msg) and isinstance(record.args, tuple) and len(record.args) > 1:
            record.args = (record.args[0], local_rank, *record.args[2:])
        return True

    talker = logging.getLogger(SubprocessContext.__module__)
    talker.addFilter(corrected)
    try:
        yield
    finally:
        talker.removeFilter(corrected)


def _kill(context: Any, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Only a process that has not been reaped: its id may be somebody else's by now."""
    handlers = getattr(context, "subprocess_handlers", {})
    if all(handler.proc.poll() is None for handler in handlers.values()):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return


def _beside(path: Any, times: int) -> Any:
    if not times or not isinstance(path, str) or path in ("", os.devnull):
        return path
    folder = Path(path).parent / f"replacement_{times}"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / Path(path).name)


def _ranks_in_order(store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
    """The ranks of a node's processes, without asking: all nodes have equally many, as TaskD's manager is told."""
    count = spec.local_world_size
    size = group_world_size * count
    ranks = range(group_rank * count, (group_rank + 1) * count)
    return [Worker(local, rank, rank, size, size) for local, rank in enumerate(ranks)]


class Elastic:
    """A torchrun agent whose processes can be replaced one by one."""

    def __init__(self, agent: SimpleElasticAgent, node: int, pause: Callable[[float], None] = time.sleep) -> None:
        """`pause` is called while other nodes are waited for, and may raise what ends the wait."""
        self._agent = agent
        self._node = node
        self._pause = pause
        self._processes: Processes | None = None
        self._store: Any = None
        """That the processes meet at, if it is on this node and not torchrun's."""
        self._first: Any = None
        """The first store or connection of torchrun's: if it is a store, it ends when it is let go."""
        self._under_way = 0
        """Nodes of the job that this one joins while it is under way."""
        self.extra: dict[str, str] = {}
        """Environment of the processes beyond torchrun's."""
        self.take: Take | None = None
        """Where processes come from that need not be started."""
        self.enough_for: Callable[[int], bool] = lambda count: False
        """Whether there are that many."""

    @property
    def _handler(self) -> Any:
        return self._agent._worker_group.spec.rdzv_handler

    @property
    def _static(self) -> bool:
        return bool(self._handler.get_backend() == "static")

    @property
    def restarts(self) -> int:
        return self._agent._remaining_restarts

    @restarts.setter
    def restarts(self, value: int) -> None:
        self._agent._remaining_restarts = value

    @property
    def command(self) -> tuple[str, ...]:
        return self._processes.command if self._processes is not None else ()

    def start_all(self, under_way: int = 0) -> None:
        """A rendezvous with the agents of the other nodes, then all processes. Unmet if those are not there.

        They have met long ago if the job is `under_way`, with that many nodes: then nobody is waited for.
        """
        self._processes, self._under_way = None, under_way
        handler = self._handler
        local_agent.start_processes = self._collect
        dynamic_rendezvous._delay = self._delay
        handler.next_rendezvous = self._rendezvous
        if under_way:
            self._agent._assign_worker_ranks = _ranks_in_order
        try:
            self._open_store()
            self._agent._initialize_workers(self._agent._worker_group)
        except (DistError, RendezvousError) as error:
            raise Unmet(f"the agents of the other nodes can't be met: {type(error).__name__}: {error}") from error
        finally:
            self._agent.__dict__.pop("_assign_worker_ranks", None)
            del handler.next_rendezvous
            dynamic_rendezvous._delay = _delay
            local_agent.start_processes = _start_processes

    def _open_store(self) -> None:
        """torchrun's store: the first node has it, and the others connect to it, each time they need it.

        The first pod may be another one by now, whose store knows nobody; and of a node that lost its power nobody
        hears that a connection has ended. torchrun itself connects once, and hears nothing until it could.
        """
        handler = self._handler
        if self._static and handler.rank == 0:
            if handler._store is None:
                handler._store = TCPStore(
                    handler.master_addr, handler.master_port, is_master=True, timeout=handler.timeout,
                    wait_for_workers=False, multi_tenant=True,
                )  # fmt: skip
        elif self._static:
            handler._store = self._connect(handler.master_addr, handler.master_port, handler.timeout)
        elif handler.get_backend() == "c10d" and isinstance(handler._store, TCPStore):
            self._first = self._first or handler._store
            store = self._connect(self._first.host, self._first.port, self._first.timeout)
            handler._store = handler._state_holder._backend._store = store

    def _connect(self, host: str, port: int, timeout: timedelta) -> Any:
        limit = max(timeout.total_seconds(), _MEETING_LIMIT)
        end = time.monotonic() + limit
        why = "nobody listens there"
        while True:
            if answers(host, port):
                try:
                    store = TCPStore(host, port, is_master=False, timeout=_TRY, wait_for_workers=False)
                    store.set_timeout(timeout)
                    return store
                except DistError as error:  # one that has just ended
                    why = str(error)
            if time.monotonic() > end:
                raise Unmet(f"the store of node 0, {host}:{port}, can't be reached within {limit:g} s: {why}")
            self._pause(LOOK)

    def _shared(self, attempt: int) -> Any:
        """What the agents of all nodes write down for each other about one attempt."""
        handler = self._handler
        store = getattr(handler, "_store", None) or self._agent._worker_group.store
        return PrefixStore(f"taskd/{handler.get_run_id()}/attempt_{attempt}", getattr(store, "inner", store))

    @property
    def _attempt(self) -> int:
        return int(self._agent._worker_group.spec.max_restarts - self.restarts)

    def _delay(self, seconds: float | tuple[float, float]) -> None:
        end = time.monotonic() + (random.uniform(*seconds) if isinstance(seconds, tuple) else seconds)
        while (left := end - time.monotonic()) > 0:
            self._pause(left)

    def _rendezvous(self) -> Any:
        """torchrun's, with a store that one can stop to wait for, and with ranks in the order of the pods.

        c10d numbers nodes as they come; what the cluster says about a rank is meant for the pod that has its number.
        """
        if self._under_way and not self._static:
            store = self._handler._store
            where = RendezvousStoreInfo(store.host, store.port)  # `_meet` says where processes really meet
            return RendezvousInfo(PatientStore(store, self._pause), self._node, self._under_way, where)
        info = type(self._handler).next_rendezvous(self._handler)
        ordered = not self._static and self._node < info.world_size
        rank = self._node if ordered else info.rank
        return RendezvousInfo(PatientStore(info.store, self._pause), rank, info.world_size, info.bootstrap_store_info)

    def _collect(self, **options: Any) -> Processes:
        args, envs = options.pop("args"), options.pop("envs")
        prefixes = options.pop("log_line_prefixes", None) or {rank: f"[{options['name']}{rank}]:" for rank in args}
        destinations = options.pop("logs_specs").reify(envs)
        self._meet(envs)
        self._processes = Processes(options, args, envs, destinations, prefixes)
        take = self.take if self.enough_for(len(args)) else None
        for local_rank in args:
            self._processes.start(local_rank, self.extra, take)
        return self._processes

    def _meet(self, envs: dict[int, dict[str, str]]) -> None:
        """Have processes that start again meet at a store of their own.

        From torch 2.6 on they meet at torchrun's, which still has the addresses of those that were there before. And
        with c10d torchrun's own choice may be a node that is gone, or not that of rank 0.
        """
        group, attempt = self._agent._worker_group, self._attempt
        env = next(iter(envs.values()), {})
        agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if self._static and (attempt == 0 or not agent_store):
            return
        shared, key = self._shared(attempt), "meeting"
        if group.group_rank == 0:
            host = env["MASTER_ADDR"] if self._static else os.environ.get("POD_IP") or env["MASTER_ADDR"]
            if agent_store:
                self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                port = self._store.port
            else:
                port = free_port(host)
            shared.set(key, f"{host}:{port}")
        end = time.monotonic() + _MEETING_LIMIT
        while not shared.check([key]):
            if time.monotonic() > end:
                raise Unmet(f"node 0 has not said within {_MEETING_LIMIT:g} s where all meet that start again")
            self._pause(LOOK)
        host, _, port = shared.get(key).decode().rpartition(":")
        for each in envs.values():
            each["MASTER_ADDR"], each["MASTER_PORT"] = host, port

    @property
    def ranks(self) -> dict[int, int]:
        """Global ranks by local ranks."""
        return {worker.local_rank: worker.global_rank for worker in self._agent._worker_group.workers}

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by local ranks."""
        return self._processes.pids() if self._processes is not None else {}

    def stop(self, local_ranks: Collection[int] | None = None) -> None:
        if self._processes is not None:
            self._processes.stop(list(self._processes.contexts) if local_ranks is None else local_ranks)

    def end(self, number: signal.Signals) -> None:
        """By this signal, with the time to end that torchrun grants."""
        if self._processes is not None:
            self._processes.close(number)

    def kill(self) -> None:
        """All of them, while somebody else waits for their end."""
        if self._processes is not None:
            self._processes.kill(self._processes.contexts)

    def replace(self, local_ranks: Collection[int], extra: dict[str, str]) -> None:
        """End these and start them again, without a rendezvous: nobody else takes notice."""
        processes, group = self._processes, self._agent._worker_group
        assert processes is not None
        processes.stop(local_ranks)
        for local_rank in local_ranks:
            processes.replaced[local_rank] = processes.replaced.get(local_rank, 0) + 1
            group.workers[local_rank].id = processes.start(local_rank, {**self.extra, **extra}, self.take)
        group.state = WorkerState.HEALTHY

    def ended(self, local_rank: int) -> int | None:
        """The exit code of a process that has ended, negative for a signal; None while it runs."""
        assert self._processes is not None
        return self._processes.code(local_rank)

    def tidy(self, local_rank: int) -> None:
        """After the end of a process: torchrun says what it has to say, and closes its files."""
        assert self._processes is not None
        with _as_it_is(local_rank):
            self._processes.contexts[local_rank].wait(0)

    def succeeded(self) -> RunResult:
        """As torchrun ends: when the other nodes have come so far, too. Nobody who was done before counts again."""
        self._agent._worker_group.state = WorkerState.SUCCEEDED
        try:
            self._open_store()
            self._agent._store = PatientStore(self._shared(self._attempt), self._pause)
            self._agent._exit_barrier()
        except (Unmet, DistError) as error:
            log.warning("the other nodes are not waited for: %s", str(error))
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.ranks.values()))

    def leave(self) -> None:
        """This node goes, and the others go on: torchrun must not close the rendezvous for all."""
        if self._static:
            return
        handler = self._handler
        handler.shutdown = lambda: True
        try:
            handler._stop_heartbeats()
            exit_op = dynamic_rendezvous._RendezvousExitOp()
            handler._op_executor.run(exit_op, handler._get_deadline(timedelta(seconds=5)))
        except (DistError, RendezvousError) as error:
            log.warning("the rendezvous was not left in order: %s", str(error))
