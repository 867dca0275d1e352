"""A client that knows ClusterD from its reference alone: link failover and stress test, every answer and every end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from evertrain.clusterd.recover import timing
from evertrain.kube.port import NODE
from tests.clusterd.client import Client, Signal, Signals, Stream
from tests.clusterd.running import Running, Training, running

pytestmark = pytest.mark.matrix

NIC, STRESS = "nic", "stress"
KILL = Signal("killMaster")
STOP = ("stop_train",)


def paused(timeout: int) -> Signal:
    return Signal("stopTrain", ("pause_train",), timeout=timeout)


def goes_on() -> Signal:
    return Signal("changeStrategy", ("change_strategy",), "continue")


class Order:
    """Of one kind, and who listens to what about it."""

    def __init__(self, kind: str, training: Training, client: Client, signals: Signals) -> None:
        self.kind, self.training, self.client, self.signals = kind, training, client, signals
        method = "SubscribeNotifySwitch" if kind == NIC else "SubscribeNotifyExecStressTest"
        self.orders = client.stream(f"Recover/{method}", jobId=training.uid, role="taskd")

    async def give(self) -> tuple[int, str]:
        """To chip 1 of pod 1, which is rank 3."""
        if self.kind == NIC:
            return await self.client.switch_nics({f"{self.training.name}-node-1": {"1": True}})
        return await self.client.stress_test({f"{self.training.name}-node-1": [0]})

    def answers(self) -> Stream:
        method = "SubscribeSwitchNicSignal" if self.kind == NIC else "SubscribeStressTestResponse"
        return self.client.stream(f"Recover/{method}", jobID=self.training.uid)

    async def arrived(self) -> None:
        """The order, at who carries it out."""
        found = await self.orders.next()
        assert found is not None and found.jobId == self.training.uid
        if self.kind == NIC:
            assert (list(found.rankID), list(found.op)) == (["3"], [True])
        else:
            assert {rank: list(each.ops) for rank, each in found.stressParam.items()} == {"2": [0], "3": [0]}

    async def done(self, ok: bool = True) -> tuple[int, str]:
        if self.kind == NIC:
            return await self.client.nics_switched(ok)
        return await self.client.stress_tested({2: {0: "0"}, 3: {0: "0" if ok else "2"}})


async def ordered(clusterd: Running, kind: str) -> tuple[Order, Stream]:
    training = await clusterd.train()
    client, signals = await training.join()
    order = Order(kind, training, client, signals)
    code, info = await order.give()
    word = "switching" if kind == NIC else "stress test"
    assert (code, info) == (0, f"{word} operation was successfully distributed")
    answers = order.answers()
    assert await signals.next() == paused(0 if kind == NIC else 900)
    return order, answers


async def under_way(clusterd: Running, kind: str) -> tuple[Order, Stream]:
    order, answers = await ordered(clusterd, kind)
    assert (await order.client.stopped())[0] == 0
    await order.arrived()
    if kind == STRESS:
        assert await order.signals.next() == Signal("pauseStartAgent", ("pause_start_agent",))
    return order, answers


async def over(order: Order) -> None:
    if order.kind == STRESS:
        assert await order.signals.next() == Signal("continueStartAgent", ("continue_start_agent",))


async def answered(answers: Stream, text: str) -> None:
    """One message, then the stream ends."""
    found = await answers.next()
    assert found is not None and found.msg == text
    assert await answers.next() is None


async def trains(order: Order, transcript: int) -> None:
    """Nothing is paused, nothing is left over: the next fault begins from the start."""
    assert (await order.client.fault({2: 1}))[0] == 0
    assert await order.signals.next() == Signal("stopTrain", STOP, faults={"2": "1"})
    assert len(order.signals.transcript) == transcript + 1


@pytest.mark.parametrize("kind", [NIC, STRESS])
async def test_from_the_order_to_its_end(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, kind)
        training, client, signals = order.training, order.client, order.signals
        code, info = await order.give()
        busy = "nic is swtiching, or job recovering" if kind == NIC else "om is running, or job recovering"
        assert (code, info) == (411, f"jobId={training.uid} {busy}")
        if kind == STRESS:
            await training.reset_is(FaultFlushing=True)
        assert await order.done() == (0, "reply success")
        await over(order)
        assert await signals.next() == goes_on()
        assert (await client.went("continue"))[0] == 0
        found = await answers.next()
        assert found is not None and found.jobID == training.uid
        assert found.msg.startswith("switch nic finish" if kind == NIC else "stress test finish, result:")
        assert await answers.next() is None
        await training.reset_is(FaultFlushing=False, ranks=[])
        what = "swtiching nic" if kind == NIC else "stress test"
        assert await order.answers().error() == (grpc.StatusCode.UNKNOWN, f"jobId={training.uid} is not {what}")
        await training.ended(True)
        await trains(order, len(signals.transcript))


@pytest.mark.parametrize("kind", [NIC, STRESS])
async def test_training_that_can_not_be_paused_is_killed(tmp_path: Path, kind: str) -> None:
    """499."""
    async with running(tmp_path) as clusterd:
        order, answers = await ordered(clusterd, kind)
        before = await order.training.uids()
        assert (await order.client.stopped(499))[0] == 0
        assert await order.signals.next() == KILL
        await answered(answers, "om failed, pause train failed")
        await order.training.replaced(before, *range(order.training.pods))
        await order.training.ended(None)


@pytest.mark.parametrize("kind", [NIC, STRESS])
async def test_training_that_does_not_go_on_is_killed(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, kind)
        before = await order.training.uids()
        await order.done()
        await over(order)
        assert await order.signals.next() == goes_on()
        assert (await order.client.went("continue", 499))[0] == 0
        assert await order.signals.next() == KILL
        word = "switch nic" if kind == NIC else "stress test"
        await answered(answers, f"{word} failed, continue train failed")
        await order.training.replaced(before, *range(order.training.pods))


async def test_links_that_can_not_be_switched_lead_into_a_recovery(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, NIC)
        await order.done(False)
        signal = await order.signals.next()
        assert signal is not None and (signal.type, signal.actions) == ("stopTrain", STOP)
        await answered(answers, "switch nic failed, switch nic failed")


async def test_a_fault_while_links_are_switched_leads_into_a_recovery(tmp_path: Path) -> None:
    """406."""
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, NIC)
        assert (await order.client.went("continue", 406))[0] == 0
        signal = await order.signals.next()
        assert signal is not None and (signal.type, signal.actions) == ("stopTrain", STOP)
        await answered(answers, "switch nic failed, report error when switching nic")


async def test_a_stress_test_that_finds_a_fault_isolates_the_node(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, STRESS)
        training = order.training
        await order.done(False)
        await over(order)
        found = await answers.next()
        assert found is not None and found.msg.startswith("stress test find fault, isolate node:")
        assert await order.signals.next() == Signal("stopTrain", STOP, faults={"2": "1", "3": "1"})
        node = await training.kube.get(NODE, f"{training.name}-node-1")
        assert node["metadata"]["annotations"]["NodeHealthyStatus"] == "UnHealthy"


@pytest.mark.parametrize("code", ["3", "4"])
async def test_a_stress_test_that_does_not_end_makes_the_rank_faulty(tmp_path: Path, code: str) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, STRESS)
        assert (await order.client.stress_tested({2: {0: "0"}, 3: {0: code}}))[0] == 0
        await over(order)
        found = await answers.next()
        assert found is not None and found.msg.startswith("stress test timeout fault, faultRank:")
        assert await order.signals.next() == Signal("stopTrain", STOP, faults={"3": "1"})


async def test_a_stress_test_that_could_not_be_run_harms_nobody(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, STRESS)
        assert (await order.client.stress_tested({2: {0: "1"}, 3: {0: "1"}}))[0] == 0
        await over(order)
        assert await order.signals.next() == goes_on()
        assert (await order.client.went("continue"))[0] == 0
        found = await answers.next()
        assert found is not None and found.msg.startswith("stress test finish, result:")


async def test_a_fault_while_chips_are_tested(tmp_path: Path) -> None:
    """406: the test is waited for, then the recovery begins."""
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, STRESS)
        assert (await order.client.went("continue", 406))[0] == 0
        found = await answers.next()
        assert found is not None and found.msg == "recv fault, when stressing test"
        await order.done()
        await over(order)
        signal = await order.signals.next()
        assert signal is not None and (signal.type, signal.actions) == ("stopTrain", STOP)


# What takes too long.

WORDS = {NIC: "switch nic", STRESS: "stress test"}


@pytest.mark.parametrize("kind", [NIC, STRESS])
async def test_a_pause_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(timing, "REPORT", 1.0)
    async with running(tmp_path) as clusterd:
        order, answers = await ordered(clusterd, kind)
        before = await order.training.uids()
        assert await order.signals.next() == KILL
        await answered(answers, "pause train timeout")
        await order.training.replaced(before, *range(order.training.pods))


@pytest.mark.parametrize("kind", [NIC, STRESS])
async def test_work_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await ordered(clusterd, kind)
        monkeypatch.setattr(timing, "REPORT", 0.5)
        assert (await order.client.stopped())[0] == 0
        await order.arrived()
        if kind == STRESS:
            assert await order.signals.next() == Signal("pauseStartAgent", ("pause_start_agent",))
        await over(order)
        signal = await order.signals.next()
        assert signal is not None and (signal.type, signal.actions) == ("stopTrain", STOP)
        await answered(answers, f"{WORDS[kind]} failed, report {WORDS[kind]} timeout")


@pytest.mark.parametrize("kind", [NIC, STRESS])
async def test_a_start_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with running(tmp_path) as clusterd:
        order, answers = await under_way(clusterd, kind)
        monkeypatch.setattr(timing, "REPORT", 0.5)
        await order.done()
        await over(order)
        assert await order.signals.next() == goes_on()
        assert await order.signals.next() == KILL
        await answered(answers, f"{WORDS[kind]} failed, continue train timeout")


# What can't be ordered.


async def test_orders_that_make_no_sense(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        await clusterd.node("outside")
        client, signals = await training.join()
        node = f"{training.name}-node-1"

        async def nics(ops: Mapping[str, Mapping[str, Any]]) -> tuple[int, str]:
            lists = {key: _devices(client, **value) for key, value in ops.items()}
            found = await client.call("Recover/SwitchNicTrack", jobID=training.uid, nicOps=lists)
            return found.code, found.info

        outside = f"node:outside not exist in job:{training.uid}"
        assert await nics({"outside": {"dev": ["0"], "op": [True]}}) == (413, outside)
        assert await nics({node: {"dev": ["0", "1"], "op": [True]}}) == (413, "dev and op length is not equal")
        assert await nics({node: {"dev": [], "op": []}}) == (413, "dev or op is empty")
        assert await nics({node: {"dev": ["7"], "op": [True]}}) == (413, f"device:7 not exist in node:{node}")
        await clusterd.devices(node, super_pod=-1)
        no_super_pod = (413, f"node:{node} should operate in superPodID")
        from tests.operator.cluster import until

        async def refused() -> bool:
            return clusterd.clusterd.hub.super_pod(node) == -1

        await until(refused)
        assert await nics({node: {"dev": ["1"], "op": [True]}}) == no_super_pod

        assert await client.stress_test({node: [7]}) == (413, "op:7 not exist in support operation:[0 1]")
        assert await client.stress_test({node: [0, 0]}) == (413, f"node:{node} stress test ops should not repeat")
        everywhere = "node:AllNodes stress test ops should not repeat"
        assert await client.stress_test(everywhere=[1, 1]) == (413, everywhere)
        assert await client.stress_test({}) == (413, "stress test node is nil")
        code, info = await client.stress_test({node: []})
        assert code == 413 and info in (f"node:{node} stress test ops is nil", f"node:{node} stress test ops is 0")
        assert await client.stress_test({"outside": [0]}) == (413, outside)
        assert signals.transcript == []

        assert (await client.fault({2: 1}))[0] == 0
        assert (await client.stress_test({node: [0]}))[0] == 411, "a recovery is under way"


def _devices(client: Client, **fields: Any) -> Any:
    from tests.clusterd.client import _messages

    return _messages("DeviceList", {"x": fields})["x"]


async def test_everywhere_means_every_rank(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client, signals = await training.join()
        orders = client.stream("Recover/SubscribeNotifyExecStressTest", jobId=training.uid, role="taskd")
        assert (await client.stress_test({"ignored": [1]}, everywhere=[0, 1]))[0] == 0
        assert await signals.next() == paused(900)
        assert (await client.stopped())[0] == 0
        found = await orders.next()
        assert {rank: list(each.ops) for rank, each in found.stressParam.items()} == {
            str(rank): [0, 1] for rank in range(4)
        }
