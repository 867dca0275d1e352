"""Many nodes, many jobs, many faults, any garbage: the centre looks only at what has changed, and never falls over."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.faults.inputs import KubeNode
from evertrain.clusterd.faults.outputs import ClusterInfo
from evertrain.wire.faultinfo import NodeFault, NodeInfo
from tests.clusterd.faultworld import START, S, World, chip, device_data, link_down, make_job, node_data, switch_info

STRATEGIES = ["", "retry", "recover-in-place", "retry,recover-in-place,recover"]


def test_ten_thousand_nodes_are_merged_in_one_pass() -> None:
    data = {}
    for number in range(10_000):
        data[f"node-{number:05}"] = device_data(chip(number % 8, "80E18402", "SeparateNPU"), chips=8)
    centre, info = FaultCentre(), ClusterInfo()
    began = time.monotonic()
    for name, each in data.items():
        centre.device(name, each)
    written = info.update(centre.process(START), START)
    print(f"10 000 nodes: {time.monotonic() - began:.2f} s, {len(written)} ConfigMaps")
    pages = [text for name, text in written.items() if name.startswith("cluster-info-device-")]
    assert sum(len(json.loads(text)) for text in pages) == 10_000
    assert all(len(text.encode()) <= 800 * 1024 for text in pages)
    began = time.monotonic()
    for name, each in data.items():
        centre.device(name, each)
    assert info.update(centre.process(START + S), START + S) == {}
    again = time.monotonic() - began
    centre.device("node-00077", device_data(chips=8))
    assert len(info.update(centre.process(START + 2 * S), START)) == 1
    assert again < 5, "what has not changed is not read again"


def test_a_change_costs_the_same_however_many_jobs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the looks at nodes and jobs that a fault leads to."""
    strategy = "retry,recover-in-place"
    jobs = [
        make_job(f"job-{number}", nodes=tuple(f"n{number}-{pod}" for pod in range(5)), strategy=strategy)
        for number in range(1000)
    ]
    world = World(nodes=0)
    for job in jobs:
        for pod in job.pods.values():
            world.centre.device(pod.node, device_data())
    world.job(*jobs)
    world.look()
    looks: list[str] = []
    for name in ("_look", "_look_at_job"):
        real = getattr(FaultCentre, name)

        def counted(self, which, *rest, real=real):
            looks.append(which)
            return real(self, which, *rest)

        monkeypatch.setattr(FaultCentre, name, counted)
    began = time.monotonic()
    for number in range(100):
        looks.clear()
        result = world.chips(f"n{number}-3", chip(1, "80E18402", "SeparateNPU"))
        assert looks == [f"n{number}-3", f"job-{number}"]
        assert list(result.changed) == [f"job-{number}"]
    print(f"a fault among 1 000 jobs: {(time.monotonic() - began) * 10:.2f} ms")
    looks.clear()
    world.centre.jobs(dict(world.jobs))
    world.look()
    assert looks == []
    assert len(world.result.jobs) == 100


def test_nothing_is_looked_at_without_a_reason() -> None:
    world = World(make_job(strategy="retry,recover-in-place"))
    world.chips("n0", chip(0, "80E18402", "SeparateNPU"))
    assert world.result.next_ms is None
    world.centre.job("job-uid-1", make_job(strategy="retry,recover-in-place"))
    assert world.look().news == frozenset() and world.result.changed == {}


CODES = ["80E01801", "8C1F860B", "80C98009", "81078603", "8C1F8608", "80E18402", "80818C05", "ABCD0001"]
LEVELS = [
    "NotHandleFault", "SubHealthFault", "RestartRequest", "RestartBusiness", "FreeRestartNPU", "RestartNPU",
    "PreSeparateNPU", "SeparateNPU",
]  # fmt: skip
nodes = st.sampled_from(["n0", "n1", "n2"])
faults = st.builds(chip, st.integers(0, 3), st.sampled_from(CODES), st.sampled_from(LEVELS), st.integers(0, 100 * S))
"""Their times are how long ago they came."""
LINK_OF_SWITCH_DOWN = switch_info("[0x08520003,na,L2,na]", "NotHandle", "Healthy")
switches = st.none() | st.sampled_from([
    LINK_OF_SWITCH_DOWN,
    switch_info("[0x00f103b0,155907,na,na]", "Separate", "UnHealthy"),
    switch_info("[0x00f103b0,155907,na,na]", "PreSeparate", "PreSeparate"),
])  # fmt: skip
public = st.fixed_dictionaries({
    "id": st.just("message-1"), "timestamp": st.just(START), "version": st.just("1.0"), "resource": st.just("CCAE"),
    "faults": st.lists(st.fixed_dictionaries({
        "faultId": st.sampled_from(["fault-0001", "fault-0002"]), "faultType": st.just("NPU"),
        "faultCode": st.sampled_from(["220001001", "110001022"]), "faultTime": st.just(START),
        "assertion": st.sampled_from(["occur", "recover", "once"]),
        "influence": st.lists(st.fixed_dictionaries({
            "nodeName": nodes, "deviceIds": st.lists(st.integers(0, 3), min_size=1, unique=True),
        }), min_size=1, max_size=2),
    }), min_size=1, max_size=2),
})  # fmt: skip
node_infos = st.sampled_from([
    NodeInfo((NodeFault("CPU", 1, ("2C000031",), "SeparateFault"),), "UnHealthy"),
    NodeInfo((NodeFault("CPU", 1, ("0000001D",), "PreSeparateFault"),), "PreSeparate"),
])  # fmt: skip
jobs = st.builds(
    make_job,
    st.just("job-uid-1"),
    st.permutations(["n0", "n1", "n2"]).map(lambda names: tuple(names[:2])),
    strategy=st.sampled_from(STRATEGIES),
    complete=st.booleans(),
    generation=st.sampled_from("abc"),
    annotations=st.sampled_from([{}, {"huawei.com/schedule.filter.faultLevel": "RestartNPU:20"}]),
)
steps = st.one_of(
    st.tuples(st.just("chips"), nodes, st.lists(faults, max_size=3), switches),
    st.tuples(st.just("node"), nodes, st.none() | node_infos),
    st.tuples(st.just("gone"), nodes),
    st.tuples(st.just("job"), st.none() | jobs),
    st.tuples(st.just("report"), st.dictionaries(st.integers(-1, 5), st.sampled_from("012"))),
    st.tuples(st.just("public"), public),
    st.tuples(st.just("kube"), st.dictionaries(nodes, st.builds(KubeNode, st.booleans()))),
    st.tuples(st.just("wait"), st.integers(0, 200 * S)),
    st.tuples(st.just("restart")),
)


def play(world: World, step: tuple) -> None:
    match step:
        case "chips", node, found, switch:
            world.chips(node, *(replace(each, time_ms=world.now - each.time_ms) for each in found), switch=switch)
        case "node", node, info:
            world.centre.node(node, None if info is None else node_data(info))
        case "gone", node:
            world.centre.device(node, None)
        case "job", job:
            world.jobs = {} if job is None else {job.uid: job}
            world.centre.jobs(world.jobs)
        case "report", ranks:
            world.centre.process_report("job-uid-1", ranks, world.now)
        case "public", message:
            world.centre.public(message, world.now)
        case "kube", found:
            world.centre.k8s_nodes(found)
        case "wait", ms:
            world.at(world.now - START + ms)
        case ("restart",):
            world.restart()
    world.look()


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=25))
def test_whatever_happens_looking_at_changes_finds_what_looking_at_all_would(story: list[tuple]) -> None:
    """The centre looks only at what has changed. One that is told to look at everything finds the same."""
    world = World(make_job(strategy="retry"))
    world.centre.manual_policy("enabled: true\nseparate: {fault_threshold: 1}")
    for step in story:
        play(world, step)
        if step[0] == "restart":
            continue
        before = (dict(world.result.jobs), dict(world.result.devices), dict(world.result.switches),
                  dict(world.result.nodes), dict(world.result.isolated), world.result.labels)  # fmt: skip
        world.centre._dirty_nodes.update(world.centre._cluster.nodes)
        world.centre._dirty_jobs.update(world.centre._cluster.views)
        world.look()
        after = (dict(world.result.jobs), dict(world.result.devices), dict(world.result.switches),
                 dict(world.result.nodes), dict(world.result.isolated), world.result.labels)  # fmt: skip
        assert before == after
    for node in ("n0", "n1", "n2"):
        world.centre.device(node, None)
        world.centre.node(node, None)
    world.centre.manual_policy(None)
    world.centre.jobs({})
    world.look()
    world.at(world.now - START + 1000 * S)
    assert world.result.jobs == {} and world.result.devices == {} and world.result.isolated == {}
    assert world.result.labels == {}


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=12))
@example([  # another pod takes the place of the one whose retry failed
    ("chips", "n0", [chip(0, "8C1F860B", "NotHandleFault", 0)], LINK_OF_SWITCH_DOWN), ("wait", 10 * S),
    ("job", make_job(strategy="retry", generation="b")),
])  # fmt: skip
@example([  # nothing but time passes after which the link is not what is wrong
    ("chips", "n0", [chip(0, "8C1F860B", "NotHandleFault", 0)], LINK_OF_SWITCH_DOWN), ("wait", 180 * S),
    ("job", make_job(strategy="retry")),
])  # fmt: skip
def test_a_restart_at_any_moment_loses_nothing(story: list[tuple]) -> None:
    world = World(make_job(strategy="retry"))
    for step in story:
        play(world, step)
    complete = {uid for uid, job in world.jobs.items() if job.complete}
    before = {uid: faults for uid, faults in world.result.jobs.items() if uid in complete}
    devices = dict(world.result.devices)
    kube = world.centre._cluster.kube
    world.restart()
    if kube is not None:
        world.centre.k8s_nodes(kube)
    world.look()
    assert {uid: faults for uid, faults in world.result.jobs.items() if uid in complete} == before
    assert world.result.devices == devices


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
texts = st.text(max_size=30) | st.builds(json.dumps, json_values)
names = st.sampled_from(["DeviceInfoCfg", "SwitchInfoCfg", "NodeInfo", "n0"])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, texts), texts, texts, json_values)
def test_garbage_is_named_and_changes_nothing(data: dict[str, str], text: str, other: str, value: object) -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "80E18402", "SeparateNPU"), link_down(1))
    before = dict(world.result.devices)
    data.pop("SwitchInfoCfg", None)
    world.centre.device("n0", data)
    world.centre.node("n0", data)
    world.centre.device("n1", {**device_data(), "SwitchInfoCfg": text})
    world.centre.manual_policy(text)
    world.centre.manual_listed(data)
    world.centre.relation_rules(text, other)
    assert world.centre.public(value, world.now)
    world.centre.public_config_map("cm", text, world.now)
    world.centre.process_report("job-uid-1", {0: text}, world.now)
    world.look()
    assert world.result.devices == before
    assert world.hit() == [(0, "80E18402", "SeparateNPU", "1")]
    with pytest.raises(ValueError):
        world.centre.load(text.encode("utf-8", "surrogatepass") + b"}")


@pytest.mark.parametrize("broken", ["_look", "_look_at_job"])
def test_a_node_or_job_that_cannot_be_judged_hides_no_other(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_job("a", nodes=("n0",)), make_job("b", nodes=("n1",)))
    real = getattr(FaultCentre, broken)

    def breaks(self, which, *rest):
        if which in ("n0", "a"):
            raise ArithmeticError("no such thing")
        return real(self, which, *rest)

    monkeypatch.setattr(FaultCentre, broken, breaks)
    for node in ("n0", "n1"):
        world.centre.device(node, device_data(chip(0, "80E18402", "SeparateNPU")))
    result = world.centre.process(world.now)
    assert list(result.jobs) == ["b"] and "no such thing" in result.complaints[0]


@pytest.mark.parametrize("raised", [2**62, -(2**62)])
def test_numbers_beyond_all_clocks(raised: int) -> None:
    world = World(make_job())
    event = {"AssembledFaultCode": "[0x08520003,na,L2,na]", "AlarmRaisedTime": raised}
    switch = {"FaultCode": [json.dumps(event)], "UpdateTime": 2**62, "FaultLevel": "NotHandle"}
    fault = chip(0, "80E01801", "SeparateNPU", 2**63 - 1)
    world.centre.device("n0", {**device_data(fault, super_pod=2**62), "SwitchInfoCfg": json.dumps(switch)})
    world.centre.device("n1", device_data(chip(0, "80E01801", "SeparateNPU", -(2**63))))
    world.centre.manual_policy("enabled: true")
    late = {"Total": ["Ascend910-0"], "Detail": {"Ascend910-0": [{"FaultCode": "X", "LastSeparateTime": 10**30}]}}
    world.centre.manual_listed({"n0": json.dumps(late)})
    result = world.look()
    assert ClusterInfo().update(result, world.now)
    assert result.manual == {} and len(result.jobs["job-uid-1"].ranks) == 2
    world.restart()
    world.at(10_000 * S)
