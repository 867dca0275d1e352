"""A client that knows ClusterD from its reference alone, through each way of a recovery: the signals are those of the
reference, in its order and with its fields, and what others read in the cluster is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.clusterd.recover import timing
from tests.clusterd.client import Client, Signal, Signals
from tests.clusterd.running import Running, Training, running

STOP = ("stop_train",)
GLOBAL, GLOBAL_EXIT = ("on_global_rank",), ("on_global_rank", "fault_nodes_exit")
CHANGE = ("change_strategy",)
DUMP_EXIT = "dump_exit"


def change(strategy: str, *nodes: str, faults: dict[str, str] | None = None, extra: str = "") -> Signal:
    return Signal("changeStrategy", CHANGE, strategy, faults or {}, nodes, 0, extra)


async def stopped(training: Training, faults: dict[int, int], **options: object) -> tuple[Client, Signals]:
    """Up to where training has stopped."""
    client, signals = await training.join()
    assert (await client.fault(faults)) == (0, "receive ReportProcessFault")
    expected = {str(rank): str(kind) for rank, kind in faults.items()}
    signal = await signals.next()
    assert signal == Signal("stopTrain", STOP, faults=expected)
    await training.reset_is(FaultFlushing=True, ranks=[])
    code, info = await client.stopped(0, faults)
    assert code == 0 and info == f"jobId={training.uid}, uuid={signal.uuid}, receive ReportStopComplete"
    return client, signals


async def all_know(training: Training, **options: object) -> tuple[Client, Signals]:
    """Up to where all ranks know that rank 2, in pod 1, is lost."""
    client, signals = await stopped(training, {2: 1})
    assert await signals.next() == Signal("globalFault", GLOBAL_EXIT, faults={"2": "1", "3": "1"}, nodes=("1",))
    await training.reset_is(FaultFlushing=False, ranks=[2, 3], RestartFaultProcess=False)
    return client, signals


async def recovering(training: Training) -> tuple[Client, Signals]:
    """Up to where the replacement is awaited."""
    training.let_go = False
    client, signals = await all_know(training)
    code, info = await client.can("recover", "dump", "exit", ranks={2: 1})
    assert code == 0 and info.endswith(", receive ReportRecoverStrategy")
    assert await signals.next() == change("recover", "1", faults={"2": "1", "3": "1"})
    return client, signals


async def trains(training: Training, client: Client, signals: Signals, before: int) -> None:
    """All is as if nothing had been: the next fault begins from the start, on the same stream, under a new uuid."""
    await training.reset_is(FaultFlushing=False, ranks=[])
    assert (await training.group_now())["metadata"]["labels"]["process-recover-enable"] == "on"
    uuids = {signal.uuid for signal in signals.transcript}
    assert len(signals.transcript) == before, signals.transcript[before:]
    assert (await client.fault({0: 1}))[0] == 0
    signal = await signals.next()
    saves = Signal("saveAndExit", ("save_and_exit",), nodes=("0",))  # of a job that can do nothing else
    first = saves if training.strategies.startswith("dump") else Signal("stopTrain", STOP, faults={"0": "1"})
    assert signal == first and signal.uuid not in uuids


async def job_is_rescheduled(training: Training, before: dict[int, str]) -> None:
    """As a whole."""
    await training.replaced(before, *range(training.pods))
    await training.ended()
    await training.reset_is(FaultFlushing=False, ranks=[])
    assert (await training.group_now())["metadata"]["labels"]["process-recover-enable"] == "on"


async def pods_are_rescheduled(
    training: Training, client: Client, signals: Signals, before: dict[int, str], *pods: int
) -> None:
    """Those at fault, and in the others all processes start again. Nothing more is said about it."""
    said = len(signals.transcript)
    await training.replaced(before, *pods)
    await training.reset_is(RetryTime=1, ranks=[], FaultFlushing=False)
    await training.ended()
    await trains(training, client, signals, said)


async def test_recover(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await recovering(training)
        training.let_go = True
        await training.replaced(before, 1)
        await training.reset_is(ranks=[])  # new processes find nothing that holds them back
        code, info = await client.went("recover")
        assert code == 0 and info.endswith(", receive ReportRecoverStatus")
        await training.reported("recover-success")
        incident = await training.ended(True)
        assert incident.decision == "recover" and [fault.rank for fault in incident.faults][0] == 2
        assert len({signal.uuid for signal in signals.transcript}) == 1, "one recovery, one uuid"
        await trains(training, client, signals, 3)


@pytest.mark.parametrize(("kind", "timeout"), [(0, 0), (2, 33)])
async def test_retry(tmp_path: Path, kind: int, timeout: int) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await stopped(training, {1: kind})
        assert await signals.next() == Signal("globalFault", GLOBAL, faults={"1": str(kind)}, timeout=timeout)
        assert (await client.can("retry", "recover", "dump", "exit"))[0] == 0
        assert await signals.next() == change("retry", "0", faults={"1": str(kind)})
        assert (await client.went("retry"))[0] == 0
        await training.reported("retry-success")
        await training.ended(True)
        assert await training.uids() == before, "nobody restarts"
        await trains(training, client, signals, 3)


async def retried(training: Training, code: int, *strategies: str) -> tuple[Client, Signals]:
    client, signals = await stopped(training, {2: 0})
    assert await signals.next() == Signal("globalFault", GLOBAL, faults={"2": "0"})
    assert (await client.can("retry", *strategies))[0] == 0
    assert await signals.next() == change("retry", "1", faults={"2": "0"})
    training.let_go = False
    assert (await client.went("retry", code))[0] == 0
    await training.reported("retry-failed")
    return client, signals


async def test_retry_that_fails_with_405_falls_back_to_recover(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await retried(training, 405, "recover", "dump", "exit")
        assert await signals.next() == Signal("globalFault", GLOBAL_EXIT, faults={"2": "1", "3": "1"}, nodes=("1",))
        assert (await client.can("recover", "dump", "exit"))[0] == 0
        assert await signals.next() == change("recover", "1", faults={"2": "1", "3": "1"})
        training.let_go = True
        await training.replaced(before, 1)
        assert (await client.went("recover"))[0] == 0
        await training.reported("recover-success")
        incident = await training.ended(True)
        assert [(each.left, each.taken) for each in incident.fallbacks] == [("retry", "recover")]


async def test_retry_that_fails_with_406_allows_dump_but_not_recover(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await retried(training, 406, "recover", "dump", "exit")
        assert await signals.next() == change("dump", "1", faults={"2": "1", "3": "1"})
        assert (await client.went("dump"))[0] == 0
        await training.reported("dump-success")
        assert await signals.next() == change("exit", "1", extra=DUMP_EXIT)
        training.let_go = True
        await pods_are_rescheduled(training, client, signals, before, 1)


async def test_retry_that_fails_with_499_allows_exit_only(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await retried(training, 499, "recover", "dump", "exit")
        assert await signals.next() == change("exit", "1", faults={"2": "1", "3": "1"})
        training.let_go = True
        await pods_are_rescheduled(training, client, signals, before, 1)


async def test_a_job_that_was_not_ready_is_killed(tmp_path: Path) -> None:
    """404."""
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await training.join()
        assert (await client.fault({2: 1}))[0] == 0
        assert await signals.next() == Signal("stopTrain", STOP, faults={"2": "1"})
        assert (await client.stopped(404))[0] == 0
        assert await signals.next() == Signal("killMaster")
        await job_is_rescheduled(training, before)


@pytest.mark.parametrize("code", [406, 499, 405, 1])
async def test_recover_that_fails_is_followed_by_dump(tmp_path: Path, code: int) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await recovering(training)
        training.let_go = True
        await training.replaced(before, 1)
        between = await training.uids()
        assert (await client.went("recover", code))[0] == 0
        await training.reported("recover-failed")
        signal = await signals.next()
        assert signal is not None and (signal.type, signal.strategy) == ("changeStrategy", "dump")
        assert (await client.went("dump", 0))[0] == 0
        await training.reported("dump-success")
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.extra) == ("exit", DUMP_EXIT)
        await pods_are_rescheduled(training, client, signals, between)  # those at fault are new already


async def test_dump_that_fails_ends_in_exit_all_the_same(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(strategies="dump")
        before = await training.uids()
        client, signals = await training.join()
        assert (await client.fault({2: 1}))[0] == 0
        assert await signals.next() == Signal("saveAndExit", ("save_and_exit",), nodes=("1",))
        assert (await client.went("dump", 499))[0] == 0
        await training.reported("dump-failed")
        assert await signals.next() == change("exit", "1", extra=DUMP_EXIT)
        await pods_are_rescheduled(training, client, signals, before, 1)


async def test_dump_only(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(strategies="dump,exit")
        before = await training.uids()
        client, signals = await training.join()
        assert (await client.fault({2: 1}))[0] == 0
        assert await signals.next() == Signal("saveAndExit", ("save_and_exit",), nodes=("1",))
        assert (await client.went("dump"))[0] == 0
        await training.reported("dump-success")
        assert await signals.next() == change("exit", "1", extra=DUMP_EXIT)
        await pods_are_rescheduled(training, client, signals, before, 1)


async def test_a_training_that_can_only_exit(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        training.let_go = False
        client, signals = await all_know(training)
        assert (await client.can("exit"))[0] == 0
        assert await signals.next() == change("exit", "1", faults={"2": "1", "3": "1"})
        training.let_go = True
        await pods_are_rescheduled(training, client, signals, before, 1)


async def test_in_place(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(strategies="recover-in-place,recover,dump")
        before = await training.uids()
        client, signals = await stopped(training, {2: 1})
        assert await signals.next() == Signal("globalFault", GLOBAL_EXIT, faults={"2": "1"})
        await training.reset_is(ranks=[2], RestartFaultProcess=True, FaultFlushing=False)
        assert (await client.can("recover", "dump", "exit"))[0] == 0
        restart = Signal(
            "changeStrategy",
            ("change_strategy", "fault_nodes_restart"),
            "recover",
            {"2": "1"},
            ("1",),
            extra="recover-in-place",
        )
        assert await signals.next() == restart
        await training.reset_is(ranks=[])
        assert (await client.went("recover"))[0] == 0
        await training.reported("recover-success")
        await training.ended(True)
        assert await training.uids() == before, "no pod is replaced"
        await trains(training, client, signals, 3)


SMALLER, LARGER = '{"scale-in-strategy": "DP"}', '{"scale-out-strategy": "DP"}'


async def smaller(clusterd: Running) -> tuple[Training, Client, Signals]:
    """Up to where training shall go on without pod 1, for nothing can take its place."""
    training = await clusterd.train(pods=3, strategies="recover,elastic-training,dump")
    training.spares = 0
    client, signals = await all_know(training)
    assert (await client.can("recover", "downgrade", "dump", "exit"))[0] == 0
    signal = await signals.next()
    assert signal is not None and (signal.type, signal.strategy) == ("changeStrategy", "recover")
    assert await signals.next() == change("downgrade", "1", faults={"2": "1", "3": "1"}, extra=SMALLER)
    return training, client, signals


async def test_elastic_down_and_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "RESCHEDULE", 1.0)
    async with running(tmp_path) as clusterd:
        training, client, signals = await smaller(clusterd)
        assert (await client.went("downgrade", 201, isolate=[2, 3, 4, 5]))[0] == 0
        assert await signals.next() == Signal("faultNodesExit", ("fault_nodes_exit",), nodes=("2",))
        assert (await client.went("downgrade"))[0] == 0
        training.spares = 10
        signal = await signals.next()
        assert signal is not None and signal == change(
            "upgrade", *signal.nodes, faults=dict(signal.faults), extra=LARGER
        )
        assert (await client.went("upgrade"))[0] == 0
        await training.ended(True)
        await trains(training, client, signals, len(signals.transcript))


async def test_elastic_that_needs_no_isolation_goes_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 0 instead of 201 left the original waiting for ever."""
    monkeypatch.setattr(timing, "RESCHEDULE", 1.0)
    async with running(tmp_path) as clusterd:
        training, client, signals = await smaller(clusterd)
        assert (await client.went("downgrade"))[0] == 0
        training.spares = 10
        signal = await signals.next()
        assert signal is not None and signal.strategy == "upgrade"
        assert (await client.went("upgrade"))[0] == 0
        await training.ended(True)


@pytest.mark.parametrize("isolated", [False, True])
async def test_elastic_that_fails_is_followed_by_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated: bool
) -> None:
    monkeypatch.setattr(timing, "RESCHEDULE", 1.0)
    async with running(tmp_path) as clusterd:
        training, client, signals = await smaller(clusterd)
        if isolated:
            assert (await client.went("downgrade", 201, isolate=[2, 3, 4, 5]))[0] == 0
            assert await signals.next() == Signal("faultNodesExit", ("fault_nodes_exit",), nodes=("2",))
        assert (await client.went("downgrade", 499))[0] == 0
        signal = await signals.next()
        assert signal is not None and signal.strategy == "dump"
        assert (await client.went("dump"))[0] == 0
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.extra) == ("exit", DUMP_EXIT)
        training.spares = 10
        await training.ended()


@pytest.mark.parametrize("silent", ["isolated", "larger"])
async def test_elastic_of_which_nothing_more_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr(timing, "RESCHEDULE", 1.0)
    async with running(tmp_path) as clusterd:
        training, client, signals = await smaller(clusterd)
        monkeypatch.setattr(timing, "REPORT", 0.5)
        if silent == "isolated":
            assert (await client.went("downgrade", 201, isolate=[2, 3, 4, 5]))[0] == 0
            assert await signals.next() == Signal("faultNodesExit", ("fault_nodes_exit",), nodes=("2",))
        else:
            assert (await client.went("downgrade"))[0] == 0
        training.spares = 10
        if silent == "larger":
            signal = await signals.next()
            assert signal is not None and signal.strategy == "upgrade"
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.extra) == ("exit", DUMP_EXIT)
        await training.ended()


async def test_elastic_that_can_not_grow_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "RESCHEDULE", 1.0)
    async with running(tmp_path) as clusterd:
        training, client, signals = await smaller(clusterd)
        assert (await client.went("downgrade"))[0] == 0
        training.spares = 10
        signal = await signals.next()
        assert signal is not None and signal.strategy == "upgrade"
        assert (await client.went("upgrade", 499))[0] == 0
        signal = await signals.next()
        assert signal is not None and signal.strategy == "dump"
        assert (await client.went("dump"))[0] == 0
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.extra) == ("exit", DUMP_EXIT)
        await training.ended()
