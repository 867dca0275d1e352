"""A client that knows ClusterD from its reference alone: faults that nodes publish, and the hot switch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evertrain.clusterd.recover import timing
from evertrain.kube.port import POD, NotFound, Object
from evertrain.wire.faultinfo import ChipFault
from tests.clusterd.client import Client, Signal, Signals
from tests.clusterd.running import PATIENCE, Running, Training, running
from tests.operator.cluster import until

STOP = ("stop_train",)
LOST = {"2": "1", "3": "1"}


def fault(code: str, level: str, chip: int = 0) -> ChipFault:
    return ChipFault(f"Ascend910-{chip}", code, level, int(time.time() * 1000))


def change(strategy: str, *nodes: str, faults: dict[str, str] | None = None, extra: str = "") -> Signal:
    return Signal("changeStrategy", ("change_strategy",), strategy, faults or {}, nodes, 0, extra)


async def test_a_chip_that_fails_stops_its_process_and_begins_a_recovery(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(strategies="recover,dump")
        training.let_go = False
        before = await training.uids()
        client, signals = await training.join()
        await clusterd.devices("bert-node-1", fault("80E18402", "SeparateNPU"))
        pre_exit = Signal("preExitProcess", ("pre exit process",), faults={"2": "1"}, nodes=("1",))
        assert await signals.next() == pre_exit
        assert await signals.next() == Signal("stopTrain", STOP, faults={"2": "1"})
        assert (await client.fault({2: 1}))[0] == 0, "the process that was stopped is no other fault"
        assert (await client.stopped(0, {2: 1}))[0] == 0
        exits = ("on_global_rank", "fault_nodes_exit")
        assert await signals.next() == Signal("globalFault", exits, faults=LOST, nodes=("1",))
        assert (await client.can("recover", "dump"))[0] == 0
        assert await signals.next() == change("recover", "1", faults=LOST)
        training.let_go = True
        await training.replaced(before, 1)
        assert (await client.went("recover"))[0] == 0
        await training.reported("recover-success")
        incident = await training.ended(True)
        assert any(each.code == "80E18402" and each.node == "bert-node-1" for each in incident.faults)
        assert len(signals.transcript) == 4


async def test_a_chip_fault_that_can_be_retried(tmp_path: Path) -> None:
    """The chip says it first, then the process: one recovery, by running the step again."""
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await training.join()
        await clusterd.devices("bert-node-1", fault("80E01801", "RestartBusiness"))
        assert (await client.fault({2: 0}))[0] == 0
        assert await signals.next() == Signal("stopTrain", STOP, faults={"2": "0"})
        assert (await client.stopped(0, {2: 0}))[0] == 0
        assert await signals.next() == Signal("globalFault", ("on_global_rank",), faults={"2": "0"})
        assert (await client.can("retry", "recover"))[0] == 0
        assert await signals.next() == change("retry", "1", faults={"2": "0"})
        await clusterd.devices("bert-node-1")
        assert (await client.went("retry"))[0] == 0
        await training.reported("retry-success")
        await training.ended(True)
        assert await training.uids() == before


# Hot switch.


async def pod_is(training: Training, name: str, check: Callable[[Object], bool]) -> Object:
    found: Object = {}

    async def done() -> bool:
        nonlocal found
        found = await training.kube.get(POD, name, "default")
        return check(found["metadata"])

    try:
        await until(done, PATIENCE)
    except TimeoutError:
        raise AssertionError(f"{found['metadata']}") from None
    return found


def annotated(**wanted: str | None) -> Callable[[Object], bool]:
    return lambda metadata: all(metadata["annotations"].get(key) == value for key, value in wanted.items())


OLD = "bert-worker-0"
SOON = 0.5


async def switching(clusterd: Running) -> tuple[Training, Client, Signals]:
    """Up to where a backup shall be made."""
    training = await clusterd.train(strategies="recover", labels={"subHealthyStrategy": "hotSwitch"})
    training.spares = 0
    client, signals = await training.join()
    await clusterd.devices("bert-node-1", fault("81078603", "SubHealthFault"))
    assert await signals.next() == Signal("hot-switch", ("hot switch",), faults=LOST)
    await pod_is(training, OLD, annotated(inHotSwitchFlow="true", needOperatorOpe="create"))
    return training, client, signals


async def backup(training: Training) -> str:
    """As the operator makes it."""
    marks = {"inHotSwitchFlow": "true", "podType": "backup", "backupSourcePodName": OLD}
    made = await training.pod(1, "bert-backup", "-hot-1234", **marks)
    name = str(made["metadata"]["name"])
    patch = {"metadata": {"annotations": {"needOperatorOpe": None, "backupNewPodName": name}}}
    await training.kube.patch(POD, OLD, "default", patch)
    return name


async def paused(clusterd: Running) -> tuple[Training, Client, Signals, str]:
    """Up to where training pauses for the switch."""
    training, client, signals = await switching(clusterd)
    name = await backup(training)
    assert await signals.next() == Signal("hot-switch", ("new pod running",))
    return training, client, signals, name


async def migrating(clusterd: Running) -> tuple[Training, Client, Signals, str]:
    training, client, signals, name = await paused(clusterd)
    await migrate(training, client, signals, name)
    return training, client, signals, name


async def migrate(training: Training, client: Client, signals: Signals, name: str) -> None:
    """The old pod goes, and the backup takes its place."""
    training.let_go = False
    assert (await client.can("migration"))[0] == 0
    wanted = annotated(needVolcanoOpe="delete")
    old = await pod_is(training, OLD, lambda item: wanted(item) and item["labels"].get("fault-type") == "SubHealth")
    await training.end(old)
    patch = {"metadata": {"annotations": {"podType": None, "backupSourcePodName": None}}}
    await training.kube.patch(POD, name, "default", patch)
    training.let_go = True
    assert await signals.next() == change("migration")


async def test_hot_switch(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals, name = await migrating(clusterd)
        assert (await client.went("migration"))[0] == 0
        await pod_is(training, name, annotated(inHotSwitchFlow=None))
        await training.ended(True)
        assert len(signals.transcript) == 3
        training.spares = 10
        assert (await client.fault({2: 1}))[0] == 0
        signal = await signals.next()
        assert signal is not None and signal.type == "stopTrain", "other faults of such a job are recovered from"


async def test_a_backup_that_does_not_come_ends_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "NEW_POD", 1.0)
    async with running(tmp_path) as clusterd:
        training, client, signals = await switching(clusterd)
        assert await signals.next() == Signal("hot-switch", ("stop switch",))
        await pod_is(training, OLD, annotated(inHotSwitchFlow=None, needOperatorOpe=None, backupNewPodName=None))
        await training.ended()
        await clusterd.devices("bert-node-1")
        await clusterd.devices("bert-node-1", fault("81078603", "SubHealthFault"))
        assert (await client.fault({0: 1}))[0] == 0
        signal = await signals.next()
        assert signal is not None and signal.type == "stopTrain", "and is not tried again"


async def job_is_stopped(training: Training, before: dict[int, str], name: str) -> None:
    training.spares = 10

    async def gone() -> bool:
        try:
            metadata = (await training.kube.get(POD, name, "default"))["metadata"]
        except NotFound:
            return True
        if metadata["annotations"].get("needOperatorOpe") == "delete":  # the operator's work
            await training.kube.delete(POD, name, "default", grace=0)
        return False

    await until(gone, PATIENCE)
    await training.replaced(before, *range(training.pods))
    await training.ended()


@pytest.mark.parametrize("strategies", [[], ["exit"]])
async def test_training_that_can_not_pause_is_rescheduled(tmp_path: Path, strategies: list[str]) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals, name = await paused(clusterd)
        before = await training.uids()
        assert (await client.can(*strategies))[0] == 0
        await job_is_stopped(training, before, name)
        assert len(signals.transcript) == 2


@pytest.mark.parametrize("code", [406, 499])
async def test_training_that_does_not_go_on_with_the_new_pod_is_rescheduled(tmp_path: Path, code: int) -> None:
    """406; with any other code the original waited for ever."""
    async with running(tmp_path) as clusterd:
        training, client, signals, name = await migrating(clusterd)
        before = await training.uids()
        assert (await client.went("migration", code))[0] == 0
        await job_is_stopped(training, before, name)


@pytest.mark.parametrize("silent", ["pause", "old pod", "migration"])
async def test_a_hot_switch_of_which_nothing_more_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    async with running(tmp_path) as clusterd:
        training, client, signals = await switching(clusterd)
        before = await training.uids()
        if silent == "pause":
            monkeypatch.setattr(timing, "REPORT", SOON)
        name = await backup(training)
        assert await signals.next() == Signal("hot-switch", ("new pod running",))
        if silent == "old pod":
            monkeypatch.setattr(timing, "OLD_POD", SOON)
            training.let_go = False
            assert (await client.can("migration"))[0] == 0
            await pod_is(training, "bert-master-0", lambda item: item["labels"].get("fault-type") == "SubHealth")
            training.let_go = True
        if silent == "migration":
            monkeypatch.setattr(timing, "REPORT", SOON)
            before[1] = str((await training.kube.get(POD, name, "default"))["metadata"]["uid"])
            await migrate(training, client, signals, name)
        await job_is_stopped(training, before, name)
        assert len(signals.transcript) == (3 if silent == "migration" else 2)
