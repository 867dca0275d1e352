"""A client that knows ClusterD from its reference alone, and falls silent, at each point: every wait has an end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evertrain.clusterd.recover import timing
from tests.clusterd.client import Client, Signal, Signals
from tests.clusterd.running import Training, running

pytestmark = pytest.mark.matrix

STOP = ("stop_train",)
GLOBAL_EXIT = ("on_global_rank", "fault_nodes_exit")
LOST = {"2": "1", "3": "1"}
SOON = 0.5


def dump_exit(signal: Signal | None) -> bool:
    """The last word to a training that has no other way."""
    return signal is not None and (signal.type, signal.strategy, signal.extra) == (
        "changeStrategy",
        "exit",
        "dump_exit",
    )


class Silence:
    """Goes through a recovery up to a step; from then on nothing is waited for for long."""

    def __init__(self, training: Training, patch: pytest.MonkeyPatch, kind: int = 1, seconds: float = SOON) -> None:
        self.training, self._patch, self._kind, self._seconds = training, patch, kind, seconds

    async def up_to(self, step: str, *strategies: str) -> tuple[Client, Signals]:
        client, signals = await self.training.join()
        await self._go(step, "stop", client.fault({2: self._kind}))
        await signals.next()
        if step == "stop":
            return client, signals
        await self._go(step, "offers", client.stopped(0, {2: self._kind}))
        await signals.next()
        if step == "offers":
            return client, signals
        await self._go(step, "status", client.can(*strategies))
        signal = await signals.next()
        assert signal is not None and signal.type == "changeStrategy"
        return client, signals

    async def _go(self, step: str, name: str, report: object) -> None:
        if step == name:
            self._patch.setattr(timing, "REPORT", self._seconds)
        code, _ = await report  # type: ignore[misc]
        assert code == 0


async def whole_job(training: Training, before: dict[int, str]) -> None:
    await training.replaced(before, *range(training.pods))
    await training.ended()
    await training.reset_is(FaultFlushing=False, ranks=[])
    assert (await training.group_now())["metadata"]["labels"]["process-recover-enable"] == "on"


@pytest.mark.parametrize(
    ("step", "kind", "strategies"),
    [
        ("stop", 1, ()),
        ("stop", 0, ()),
        ("offers", 1, ()),
        ("offers", 0, ()),
        ("status", 1, ("recover", "exit")),
        ("status", 0, ("retry", "exit")),
        ("status", 1, ("dump", "exit")),
    ],
)
async def test_a_client_that_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, kind: int, strategies: tuple[str, ...]
) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        silence = Silence(training, monkeypatch, kind)
        _, signals = await silence.up_to(step, *strategies)
        assert dump_exit(await signals.next())
        await whole_job(training, before)


async def test_a_replacement_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        training.spares = 0
        monkeypatch.setattr(timing, "RESCHEDULE", SOON)
        client, signals = await Silence(training, monkeypatch).up_to("nothing", "recover", "exit")
        assert dump_exit(await signals.next())
        training.spares = 10
        await training.ended()


async def test_nobody_says_which_ranks_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(pods=3, strategies="recover,elastic-training,dump")
        training.spares = 0
        monkeypatch.setattr(timing, "RESCHEDULE", SOON)
        silence = Silence(training, monkeypatch, seconds=3.0)  # longer than a replacement is waited for
        client, signals = await silence.up_to("status", "recover", "downgrade", "dump", "exit")
        signal = await signals.next()
        assert signal is not None and signal.strategy == "downgrade"
        signal = await signals.next()
        assert signal is not None and signal.strategy == "dump"
        assert dump_exit(await signals.next())
        training.spares = 10
        await training.ended()


async def test_a_client_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has registered and reports, but does not listen."""
    monkeypatch.setattr(timing, "SUBSCRIBER", SOON)
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client = clusterd.client(training.uid)
        assert (await client.init())[0] == 0 and (await client.register())[0] == 0
        assert (await client.fault({2: 1}))[0] == 0
        await whole_job(training, before)


# Several things at once.


async def test_faults_that_come_while_training_stops_belong_to_the_same_recovery(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(pods=3)
        training.let_go = False
        before = await training.uids()
        client, signals = await training.join()
        assert (await client.fault({2: 1}))[0] == 0
        assert await signals.next() == Signal("stopTrain", STOP, faults={"2": "1"})
        assert (await client.fault({4: 1}))[0] == 0
        assert (await client.stopped(0, {2: 1, 4: 1}))[0] == 0
        everybody = {str(rank): "1" for rank in (2, 3, 4, 5)}
        assert await signals.next() == Signal("globalFault", GLOBAL_EXIT, faults=everybody, nodes=("1", "2"))
        assert (await client.can("recover"))[0] == 0
        signal = await signals.next()
        assert signal is not None and (signal.strategy, signal.faults) == ("recover", everybody)
        training.let_go = True
        await training.replaced(before, 1, 2)
        assert (await client.went("recover"))[0] == 0
        await training.reported("recover-success")
        await training.ended(True)
        assert len(signals.transcript) == 3


async def test_a_worse_fault_takes_the_place_of_one_that_could_be_retried(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client, signals = await training.join()
        assert (await client.fault({2: 0}))[0] == 0
        assert await signals.next() == Signal("stopTrain", STOP, faults={"2": "0"})
        assert (await client.stopped(0, {2: 1}))[0] == 0
        assert await signals.next() == Signal("globalFault", GLOBAL_EXIT, faults=LOST, nodes=("1",))


async def test_a_fault_while_training_is_smaller_begins_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(pods=3, strategies="recover,elastic-training,dump")
        training.spares = 0
        monkeypatch.setattr(timing, "RESCHEDULE", SOON)
        client, signals = await Silence(training, monkeypatch).up_to("nothing", "recover", "downgrade", "dump", "exit")
        signal = await signals.next()
        assert signal is not None and signal.strategy == "downgrade"
        assert (await client.went("downgrade"))[0] == 0
        assert (await client.fault({4: 1}))[0] == 0
        signal = await signals.next()
        assert signal is not None and signal.type == "stopTrain" and signal.faults["4"] == "1"


async def test_many_jobs_are_led_side_by_side(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        trainings = [await clusterd.train(f"job-{number}") for number in range(5)]

        async def recover(training: Training) -> list[tuple[str, str]]:
            before = await training.uids()
            client, signals = await training.join()
            await client.fault({2: 1})
            await signals.next()
            await client.stopped()
            await signals.next()
            await client.can("recover")
            await signals.next()
            await training.replaced(before, 1)
            await client.went("recover")
            await training.reported("recover-success")
            return [(signal.type, signal.strategy) for signal in signals.transcript]

        for transcript in await asyncio.gather(*map(recover, trainings)):
            assert transcript == [("stopTrain", ""), ("globalFault", ""), ("changeStrategy", "recover")]
