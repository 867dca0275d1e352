"""A client that knows ClusterD from its reference alone: recoveries in which a platform outside has its say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evertrain.clusterd.recover import timing
from evertrain.kube.port import POD
from tests.clusterd.client import Client, Signal, Signals
from tests.clusterd.running import PATIENCE, Running, Training, running
from tests.operator.cluster import until

pytestmark = pytest.mark.matrix

STOP = ("stop_train",)
LOST = {"2": "1", "3": "1"}


def change(strategy: str, *nodes: str, faults: dict[str, str] | None = None, extra: str = "") -> Signal:
    return Signal("changeStrategy", ("change_strategy",), strategy, faults or {}, nodes, 0, extra)


async def platform_job(clusterd: Running) -> tuple[Training, Client, Signals]:
    training = await clusterd.train(group_annotations={"ProcessRecoverStrategy": ""})
    client, signals = await training.join()
    return training, client, signals


async def wanted(clusterd: Running, strategy: str, faults: dict[int, int]) -> tuple[Training, Client, Signals]:
    """Up to where training stops, for the platform has said what it wants."""
    training, client, signals = await platform_job(clusterd)
    assert (await client.fault(faults))[0] == 0
    first = asyncio.ensure_future(signals.next())
    assert not (await asyncio.wait({first}, timeout=1.0))[0], "nothing before the platform has said what it wants"
    await training.annotate_group(ProcessRecoverStrategy=strategy)
    told = {str(rank): str(kind) for rank, kind in faults.items()}
    assert await first == Signal("stopTrain", STOP, faults=told)
    return training, client, signals


async def stopped(clusterd: Running, strategy: str, faults: dict[int, int]) -> tuple[Training, Client, Signals]:
    """Up to where the platform has to confirm the faults."""
    training, client, signals = await wanted(clusterd, strategy, faults)
    assert (await client.stopped(0, faults))[0] == 0

    async def confirmed() -> bool:
        annotations = (await training.group_now())["metadata"]["annotations"]
        return annotations.get("ProcessConfirmFault") == ",".join(f"{rank}:{kind}" for rank, kind in faults.items())

    try:
        await until(confirmed, PATIENCE)
    except TimeoutError:
        raise AssertionError((await training.group_now())["metadata"]["annotations"]) from None
    return training, client, signals


async def test_recover(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals = await stopped(clusterd, "recover", {2: 1})
        before = await training.uids()
        await training.annotate_group(ProcessResultFault="2:1,3:1")
        signal = await signals.next()
        assert signal is not None and (signal.type, signal.faults, signal.nodes) == ("globalFault", LOST, ("1",))
        assert (await client.can("recover", "dump", "exit"))[0] == 0
        assert await training.uids() == before, "pods are the platform's to replace"
        old = await training.kube.get(POD, "bert-worker-0", "default")
        await training.end(old)
        await training.replaced(before, 1)
        await training.annotate_group(RankTableReady="true")
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.faults) == ("recover", LOST)
        assert (await client.went("recover"))[0] == 0
        await training.reported("recover-success")
        await training.ended(True)


async def test_retry(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals = await stopped(clusterd, "retry", {2: 0})
        await training.annotate_group(ProcessResultFault="2:0")
        assert await signals.next() == Signal("globalFault", ("on_global_rank",), faults={"2": "0"})
        assert (await client.can("retry", "dump", "exit"))[0] == 0
        assert await signals.next() == change("retry", "1", faults={"2": "0"})
        assert (await client.went("retry"))[0] == 0
        await training.reported("retry-success")
        await training.ended(True)


async def test_dump(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals = await platform_job(clusterd)
        await training.annotate_group(ProcessRecoverStrategy="dump")
        assert (await client.fault({2: 1}))[0] == 0
        assert await signals.next() == Signal("saveAndExit", ("save_and_exit",), nodes=("1",))
        assert (await client.went("dump"))[0] == 0
        await training.reported("dump-success")
        assert await signals.next() == change("exit", "1", extra="dump_exit")


async def test_a_rank_table_that_can_not_be_made_is_followed_by_what_the_platform_wants_then(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals = await stopped(clusterd, "recover", {2: 1})
        await training.annotate_group(ProcessResultFault="2:1")
        signal = await signals.next()
        assert signal is not None and signal.type == "globalFault"
        assert (await client.can("recover", "dump", "exit"))[0] == 0
        await training.annotate_group(ProcessRecoverStrategy="dump")
        await training.annotate_group(RankTableReady="false")
        signal = await signals.next()
        assert signal is not None and signal.strategy == "dump"
        assert (await client.went("dump"))[0] == 0
        await training.reported("dump-success")


async def test_a_platform_that_says_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "PLATFORM", 1.0)
    async with running(tmp_path) as clusterd:
        training, client, signals = await platform_job(clusterd)
        assert (await client.fault({2: 1}))[0] == 0
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.extra) == ("exit", "dump_exit")
        await training.ended()


async def test_a_platform_that_does_not_confirm_the_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals = await wanted(clusterd, "recover", {2: 1})
        monkeypatch.setattr(timing, "PLATFORM", 0.5)
        assert (await client.stopped(0, {2: 1}))[0] == 0
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.extra) == ("exit", "dump_exit")
        await training.ended()


async def test_a_platform_that_writes_no_rank_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wants is not possible, and it wants nothing else."""
    async with running(tmp_path) as clusterd:
        training, client, signals = await stopped(clusterd, "recover", {2: 1})
        await training.annotate_group(ProcessResultFault="2:1")
        signal = await signals.next()
        assert signal is not None and signal.type == "globalFault"
        monkeypatch.setattr(timing, "PLATFORM", 0.5)
        assert (await client.can("recover", "dump", "exit"))[0] == 0
        signal = await signals.next()
        assert signal is not None and signal.strategy == "exit"
        await training.ended()
