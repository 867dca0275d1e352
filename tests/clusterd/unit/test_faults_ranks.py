"""Which ranks a fault hits, at which level, and what schedulers and subscribers see of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evertrain.clusterd.faults import state
from evertrain.clusterd.faults.inputs import KubeNode, NodeState
from evertrain.clusterd.faults.result import Isolation
from evertrain.clusterd.model import FaultDevice
from evertrain.wire.faultinfo import (
    CARD_NETWORK,
    ChipFault,
    NodeFault,
    NodeInfo,
    SwitchInfo,
    decode_device,
    encode_device,
)
from tests.clusterd.faultworld import START, S, World, chip, device_data, link_down, make_job, node_data, switch_info


def test_a_fault_hits_the_rank_that_has_the_chip() -> None:
    world = World(make_job())
    result = world.chips("n1", chip(1, "80E18402", "SeparateNPU"))
    [fault] = world.ranks()
    assert (fault.rank, fault.pod, fault.pod_uid) == (3, 1, "job-uid-1-pod-1-a")
    assert (fault.node, fault.device, fault.code, fault.level) == ("n1", "1", "80E18402", "SeparateNPU")
    assert (fault.time_ms, fault.type, fault.in_place) == (START, "1", False)
    assert result.jobs["job-uid-1"].health == "UnHealthy"
    assert result.changed == {"job-uid-1": result.jobs["job-uid-1"]}
    assert result.news == {"n1"}
    assert world.look().changed == {}, "nothing is new"


def test_a_fault_of_a_chip_that_nobody_has_hits_nobody() -> None:
    world = World(make_job())
    world.chips("n1", chip(3, "80E18402", "SeparateNPU"))
    world.chips("n2", chip(0, "80E18402", "SeparateNPU"))
    assert world.ranks() == [] and world.told() == []
    assert world.result.devices["n2"].unhealthy == ("Ascend910-0",)


@pytest.mark.parametrize(
    ("level", "hits", "health"),
    [
        ("NotHandleFault", False, "Healthy"),
        ("SubHealthFault", True, "SubHealthy"),
        ("RestartRequest", True, "UnHealthy"),
        ("RestartBusiness", True, "UnHealthy"),
        ("FreeRestartNPU", True, "UnHealthy"),
        ("RestartNPU", True, "UnHealthy"),
        ("PreSeparateNPU", False, "Healthy"),
        ("SeparateNPU", True, "UnHealthy"),
        ("ManuallySeparateNPU", True, "UnHealthy"),
        ("a level of tomorrow", True, "UnHealthy"),
    ],
)
def test_each_level(level: str, hits: bool, health: str) -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "ABCD0001", level))
    assert world.hit() == ([(0, "ABCD0001", level, "1")] if hits else [])
    assert world.health() == health
    assert world.told() == [("n0", "0", "NPU", "ABCD0001")], "subscribers hear of all of them"
    world.chips("n0")
    assert world.result.jobs == {} and world.result.changed["job-uid-1"].health == "Healthy"


def test_a_chip_to_be_reset_when_idle_counts_once_it_is_unhealthy() -> None:
    world = World(make_job())
    fault = chip(0, "8C084E00", "FreeRestartNPU")
    data = device_data(fault)
    info = decode_device(data["DeviceInfoCfg"])
    healthy = encode_device(replace(info, unhealthy=(), available=(*info.available, "Ascend910-0")))
    world.centre.device("n0", {"DeviceInfoCfg": healthy})
    world.look()
    assert world.ranks() == []
    world.centre.device("n0", data)
    world.look()
    assert world.hit() == [(0, "8C084E00", "FreeRestartNPU", "1")]


def test_pre_separate_keeps_running_jobs_and_takes_no_new_ones() -> None:
    world = World(make_job(nodes=("n0",)))
    result = world.chips("n0", chip(0, "8118043C", "PreSeparateNPU"), chip(3, "8118043C", "PreSeparateNPU"))
    device = result.devices["n0"]
    assert device.available == ("Ascend910-1", "Ascend910-2")
    assert device.unhealthy == ("Ascend910-3",), "a chip that is used is not unhealthy"
    assert result.isolated["n0"].chips == {"Ascend910-0": "PreSeparateNPU", "Ascend910-3": "PreSeparateNPU"}
    world.centre.jobs({})
    assert world.look().devices["n0"].unhealthy == ("Ascend910-0", "Ascend910-3")


def test_pre_separate_of_the_parameter_plane_is_as_the_node_says() -> None:
    world = World(make_job(nodes=("n0",)))
    down = [chip(number, "81078603", "PreSeparateNPU", kind=CARD_NETWORK) for number in (0, 3)]
    result = world.chips("n0", *down)
    assert result.devices["n0"].unhealthy == ()
    assert result.devices["n0"].network_unhealthy == ("Ascend910-0", "Ascend910-3")
    assert world.ranks() == []


def test_a_chip_with_a_worse_fault_besides_stays_unhealthy() -> None:
    world = World(make_job(nodes=("n0",)))
    result = world.chips("n0", chip(0, "8118043C", "PreSeparateNPU"), chip(0, "80E18402", "SeparateNPU"))
    assert result.devices["n0"].unhealthy == ("Ascend910-0",)
    assert world.hit() == [(0, "80E18402", "SeparateNPU", "1")]


def test_what_kind_of_fault_it_is_is_told() -> None:
    world = World(make_job())
    world.chips("n1", chip(0, "80E18402", "SeparateNPU"), chip(1, "81078603", "SubHealthFault", kind=CARD_NETWORK))
    world.centre.k8s_nodes({"n1": KubeNode(True)})
    told = {(each.node, each.device, each.kind) for each in world.look().jobs["job-uid-1"].devices}
    assert told == {
        ("n0", "-1", "NodeUnhealthy"),
        ("n1", "0", "CardUnhealthy"),
        ("n1", "1", "CardNetworkUnhealthy"),
    }


@pytest.mark.parametrize(
    ("level", "status", "expected", "health"),
    [
        ("NotHandle", "Healthy", None, "Healthy"),
        ("SubHealthFault", "SubHealthy", "SubHealthFault", "SubHealthy"),
        ("RestartRequest", "UnHealthy", "SeparateNPU", "UnHealthy"),
        ("PreSeparate", "PreSeparate", None, "Healthy"),
        ("Separate", "UnHealthy", "SeparateNPU", "UnHealthy"),
    ],
)
def test_switches_hit_every_rank_of_the_node(level: str, status: str, expected: str | None, health: str) -> None:
    world = World(make_job())
    result = world.chips("n1", switch=switch_info("[0x00f103b0,155907,na,na]", level, status))
    code = "[0x00f103b0,155907,na,na]"
    assert world.hit() == ([(rank, code, expected, "1") for rank in (2, 3)] if expected else [])
    assert world.health() == health
    assert result.switches["n1"].status == ("Healthy" if status == "PreSeparate" else status)
    [device] = result.jobs["job-uid-1"].devices
    assert device == FaultDevice("n1", "10.0.0.1", "", "-1", "Switch", code, level, "1", "2", str(START // 1000))
    assert ("n1" in result.isolated) == (status in ("PreSeparate", "UnHealthy"))
    world.centre.jobs({})
    resolved = world.look().switches["n1"].status
    assert resolved == ("UnHealthy" if status == "PreSeparate" else status), "now no pod is there"


@pytest.mark.parametrize("status", ["Healthy", "PreSeparate", "UnHealthy"])
def test_parts_of_nodes(status: str) -> None:
    world = World(make_job())
    level = {"Healthy": "NotHandleFault", "PreSeparate": "PreSeparateFault", "UnHealthy": "SeparateFault"}[status]
    world.centre.node("n0", node_data(NodeInfo((NodeFault("CPU", 1, ("0000001D", "0000001F"), level),), status)))
    result = world.look()
    bad = status == "UnHealthy"
    assert world.hit() == [(rank, "0000001D,0000001F", "SeparateNPU", "1") for rank in (0, 1) if bad]
    assert world.told() == [("n0", "1", "CPU", "0000001D"), ("n0", "1", "CPU", "0000001F")]
    assert result.nodes["n0"].status == ("UnHealthy" if bad else "Healthy")
    assert result.isolated.get("n0") == (None if status == "Healthy" else Isolation(f"the node is {status}", {}))
    world.centre.node("n0", None)
    assert world.look().nodes == {} and world.result.jobs == {} and world.result.isolated == {}


def test_nodes_that_kubernetes_has_lost() -> None:
    job = make_job(nodes=("n0", "n1", "elsewhere"))
    world = World(job)
    assert world.ranks() == [], "nobody has said yet which nodes there are"
    nodes = {name: KubeNode(True, f"10.1.1.{name[1:]}", f"SN{name}") for name in ("n0", "n1")}
    world.centre.k8s_nodes(nodes)
    world.look()
    assert world.hit() == [(rank, "", "SeparateNPU", "1") for rank in (4, 5)], "elsewhere is not there"
    assert world.told() == [("elsewhere", "-1", "Node", "")]
    world.centre.k8s_nodes({**nodes, "n1": KubeNode(False, "10.1.1.1", "SNn1"), "elsewhere": KubeNode(True)})
    world.look()
    assert world.hit() == [(rank, "", "SeparateNPU", "1") for rank in (2, 3)]
    [device] = world.result.jobs["job-uid-1"].devices
    assert (device.node_ip, device.node_sn) == ("10.1.1.1", "SNn1")
    world.centre.k8s_node("n1", KubeNode(True))
    world.look()
    assert world.result.jobs == {}
    world.centre.k8s_node("n1", None)
    world.look()
    assert world.health() == "UnHealthy"


def test_faults_are_matched_with_the_places_that_were_complete_last() -> None:
    world = World(make_job())
    world.chips("n1", chip(0, "80E18402", "SeparateNPU"))
    without = replace(make_job(complete=False), pods={0: make_job().pods[0]})
    world.job(without)
    world.look()
    assert [fault.pod_uid for fault in world.ranks()] == ["job-uid-1-pod-1-a"]
    world.restart()
    assert [fault.pod_uid for fault in world.ranks()] == ["job-uid-1-pod-1-a"], "also after a restart"
    world.job(make_job(nodes=("n0", "n2"), generation="b"))
    world.look()
    assert world.ranks() == []


def test_what_is_remembered_of_jobs_that_went_while_nobody_looked_is_forgotten() -> None:
    world = World(make_job(complete=True), make_job("other", ("n2",), complete=True))
    for each in ("job-uid-1", "other"):
        world.centre.expose(pod.uid for pod in world.jobs[each].pods.values())
    world.job(replace(make_job("other", ("n2",), complete=False), pods={}), replace(make_job(complete=False), pods={}))
    world.chips("n2", link_down(0))
    world.chips("n0", link_down(0))
    kept = state.decode(world.centre.dump())
    assert set(kept.tables) == set(kept.relations) == {"job-uid-1", "other"} and len(kept.exposed) == 3
    del world.jobs["other"]
    world.restart()
    kept = state.decode(world.centre.dump())
    assert set(kept.tables) == set(kept.relations) == {"job-uid-1"}
    assert kept.exposed == ["job-uid-1-pod-0-a", "job-uid-1-pod-1-a"]


def test_a_node_that_can_not_be_judged_stays_as_it_was_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "80E18402", "SeparateNPU"))
    with monkeypatch.context() as patched:
        found = NodeState.faults

        def faults(self: NodeState, now: int) -> list[ChipFault]:
            if self.name == "n0":
                raise ValueError("poisoned")
            return found(self, now)

        patched.setattr(NodeState, "faults", faults)
        world.centre.device("n0", device_data())
        world.centre.device("n1", device_data(chip(1, "80E18402", "SeparateNPU")))
        result = world.centre.process(world.now)
        assert any("node n0 can't be judged: ValueError('poisoned')" in each for each in result.complaints)
        assert [fault.node for fault in result.jobs["job-uid-1"].ranks] == ["n0", "n1"]
        assert world.centre.process(world.now).complaints == (), "it is said once"
    world.look()
    assert [fault.node for fault in world.ranks()] == ["n1"], "nobody has to publish it again"


def test_a_job_that_was_never_complete_is_hit_by_nothing() -> None:
    world = World(replace(make_job(complete=False), status="pending"))
    world.chips("n1", chip(0, "80E18402", "SeparateNPU"))
    assert world.ranks() == []


def test_a_job_that_is_done_or_gone_is_hit_by_nothing() -> None:
    world = World(make_job())
    world.chips("n1", chip(0, "80E18402", "SeparateNPU"))
    world.job(replace(make_job(), status="complete"))
    assert world.look().changed["job-uid-1"].health == "Healthy"
    world.job(make_job())
    world.look()
    assert world.ranks()
    world.centre.jobs({})
    assert world.look().changed["job-uid-1"].ranks == () and world.result.jobs == {}


def test_jobs_without_chips() -> None:
    world = World(make_job(chips=0))
    world.chips("n0", chip(0, "80E18402", "SeparateNPU"))
    assert world.ranks() == []
    world.centre.node("n1", node_data(NodeInfo((NodeFault("CPU", 1, ("2C000031",), "SeparateFault"),), "UnHealthy")))
    world.look()
    assert world.hit() == [(1, "2C000031", "SeparateNPU", "1")]


def test_a_chip_belongs_to_the_job_that_has_it_now() -> None:
    old = make_job("old", nodes=("n0", "n1"))
    world = World(old)
    world.job(replace(old, pods={}, complete=False), make_job("new", nodes=("n0",)))
    world.chips("n0", chip(0, "80E18402", "SeparateNPU"))
    assert world.hit("new") == [(0, "80E18402", "SeparateNPU", "1")] and world.ranks("old") == []


def test_what_cannot_be_used_changes_nothing_and_is_named() -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "80E18402", "SeparateNPU"))
    good = device_data()
    world.centre.device("n0", {"DeviceInfoCfg": good["DeviceInfoCfg"].replace("Ascend910-1", "Ascend910-7")})
    result = world.look()
    assert len(result.complaints) == 1 and "mindx-dl-deviceinfo-n0 is ignored" in result.complaints[0]
    assert world.hit() == [(0, "80E18402", "SeparateNPU", "1")]
    assert world.look().complaints == ()
    world.centre.device("n0", {})
    world.centre.device("n0", {"DeviceInfoCfg": good["DeviceInfoCfg"], "SwitchInfoCfg": "{"})
    result = world.look()
    assert result.jobs == {} and "the switch in" in result.complaints[0]
    world.centre.device("n0", None)
    assert "n0" not in world.look().devices


def test_a_switch_that_is_no_longer_published_is_gone() -> None:
    world = World(make_job())
    world.chips("n0", switch=SwitchInfo(level="Separate", status="UnHealthy"))
    assert world.health() == "UnHealthy"
    world.chips("n0")
    assert world.health() == "Healthy" and world.result.switches == {}


def test_a_fault_that_names_no_time_or_one_to_come_came_when_it_was_seen() -> None:
    world = World(make_job(strategy="recover-in-place"))
    for came in (0, START + 1000 * S):
        world.chips("n0", chip(0, "80CB800A", "RestartRequest", came))
        assert world.codes("n0") == []
        assert world.result.next_ms == world.now + 60 * S
        world.chips("n0")
