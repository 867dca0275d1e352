"""What is written for schedulers and others, and how it is split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.clusterd.faults.outputs import LARGEST, ClusterInfo, Pages, fault_job_info
from evertrain.clusterd.model import Device, Job, JobFaults, Pod, RankFault
from evertrain.wire.faultinfo import CARD_NETWORK, NodeFault, NodeInfo
from tests.clusterd.faultworld import START, S, World, chip, device_data, make_job, node_data, switch_info


def test_the_first_time_all_is_written() -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "80E18402", "SeparateNPU"), chip(0, "80E18401", "NotHandleFault"), super_pod=3, rack=9)
    info = ClusterInfo()
    written = info.update(world.result, world.now)
    assert list(written) == ["cluster-info-device-0", "cluster-info-node-cm"]
    assert written["cluster-info-node-cm"] == ""
    devices = json.loads(written["cluster-info-device-0"])
    assert list(devices) == ["mindx-dl-deviceinfo-n0", "mindx-dl-deviceinfo-n1", "mindx-dl-deviceinfo-n2"]
    one = devices["mindx-dl-deviceinfo-n0"]
    assert list(one) == ["DeviceList", "UpdateTime", "CmName", "SuperPodID", "RackID", "ServerIndex"]
    assert (one["CmName"], one["SuperPodID"], one["RackID"]) == ("mindx-dl-deviceinfo-n0", 3, 9)
    assert one["DeviceList"]["huawei.com/Ascend910-Unhealthy"] == "Ascend910-0"
    [entry] = json.loads(one["DeviceList"]["huawei.com/Ascend910-Fault"])
    assert (entry["fault_code"], entry["fault_level"]) == ("80E18402,80E18401", "SeparateNPU")
    assert info.update(world.look(), world.now) == {}, "nothing is new"


def test_of_too_many_nodes_with_faults_the_worst_are_written() -> None:
    """All nodes of a large cluster see the same: their clocks were set, say. Those that are unfit must be known."""
    world, info = World(make_job()), ClusterInfo(largest=2000)
    harmless = NodeInfo((NodeFault("Node", 0, ("E8000005",), "NotHandleFault"),))
    leaving = NodeInfo((NodeFault("CPU", 0, ("2C000031",), "PreSeparateFault"),))  # called so while it is used
    lost = NodeInfo((NodeFault("CPU", 0, ("2C000031",), "SeparateFault"),), "UnHealthy")
    for number in range(20):
        world.centre.node(f"m{number}", node_data(harmless))
    world.centre.node("n1", node_data(leaving))
    world.centre.node("z", node_data(lost))
    text = info.update(world.look(), world.now)["cluster-info-node-cm"]
    assert len(text) <= 2000 and len(json.loads(text)) > 5
    assert list(json.loads(text))[:2] == ["mindx-dl-nodeinfo-z", "mindx-dl-nodeinfo-n1"]
    for number in range(20):
        world.centre.node(f"m{number}", None)
    text = info.update(world.look(), world.now)["cluster-info-node-cm"]
    assert set(json.loads(text)) == {"mindx-dl-nodeinfo-z", "mindx-dl-nodeinfo-n1"}


def test_later_only_what_has_changed_is_written() -> None:
    world = World(make_job())
    info = ClusterInfo()
    info.update(world.result, world.now)
    world.centre.node("n1", node_data(NodeInfo((NodeFault("CPU", 1, ("2C000031",), "SeparateFault"),), "UnHealthy")))
    written = info.update(world.look(), START + 5)
    assert written == {
        "cluster-info-node-cm": '{"mindx-dl-nodeinfo-n1":{"FaultDevList":[{"DeviceType":"CPU","DeviceId":1,'
        '"FaultCode":["2C000031"],"FaultLevel":"SeparateFault"}],"NodeStatus":"UnHealthy",'
        f'"CmName":"mindx-dl-nodeinfo-n1","UpdateTime":{START + 5}}}}}'
    }
    code = "[0x00f103b0,155907,na,na]"
    written = info.update(world.chips("n1", switch=switch_info(code, "Separate", "UnHealthy")), world.now)
    assert list(written) == ["cluster-info-switch-0"]
    [(name, switch)] = json.loads(written["cluster-info-switch-0"]).items()
    assert name == switch["CmName"] == "mindx-dl-switchinfo-n1"
    assert (switch["FaultLevel"], switch["NodeStatus"]) == ("Separate", "UnHealthy")
    assert json.loads(switch["FaultCode"][0])["AssembledFaultCode"] == code
    assert switch["FaultTimeAndLevelMap"] == {f"{code}_1_2": {"fault_time": START, "fault_level": "Separate"}}
    world.centre.device("n1", None)
    world.centre.node("n1", None)
    written = info.update(world.look(), world.now)
    assert "n1" not in written["cluster-info-device-0"] and "n2" in written["cluster-info-device-0"]
    assert written["cluster-info-switch-0"] == written["cluster-info-node-cm"] == ""


def test_public_faults_are_in_seconds_and_isolation_has_no_code() -> None:
    world = World(make_job())
    fault = {"faultId": "fault-0001", "faultType": "NPU", "faultCode": "220001001", "faultTime": START,
             "assertion": "occur", "influence": [{"nodeName": "n0", "deviceIds": [0]}]}  # fmt: skip
    message = {"id": "message-1", "timestamp": START, "version": "1.0", "resource": "CCAE", "faults": [fault]}
    assert world.centre.public(message, world.now) == ""
    world.centre.manual_policy("enabled: true")
    world.centre.manual_listed({"n0": '{"Total":["Ascend910-0"]}'})
    text = ClusterInfo().update(world.look(), world.now)["cluster-info-device-0"]
    lists = json.loads(text)["mindx-dl-deviceinfo-n0"]["DeviceList"]
    public, manual = json.loads(lists["huawei.com/Ascend910-Fault"])
    assert public["fault_type"] == "PublicFault"
    assert public["fault_time_and_level_map"]["220001001"]["fault_time"] == START // 1000
    assert (manual["fault_code"], manual["fault_level"]) == ("", "ManuallySeparateNPU")


def test_two_kinds_of_faults_of_a_chip_are_two_entries() -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "A", "SeparateNPU"), chip(0, "81078603", "PreSeparateNPU", kind=CARD_NETWORK))
    text = ClusterInfo().update(world.result, world.now)["cluster-info-device-0"]
    lists = json.loads(text)["mindx-dl-deviceinfo-n0"]["DeviceList"]
    kinds = [entry["fault_type"] for entry in json.loads(lists["huawei.com/Ascend910-Fault"])]
    assert kinds == ["CardUnhealthy", "CardNetworkUnhealthy"]


def test_what_does_not_fit_goes_to_the_next_page_and_surplus_pages_are_emptied() -> None:
    world = World(nodes=40)
    info = ClusterInfo(largest=4000)
    written = info.update(world.result, world.now)
    pages = [name for name in written if name.startswith("cluster-info-device-")]
    assert len(pages) > 3 and all(len(written[name].encode()) <= 4000 for name in pages)
    found = [key for name in pages for key in json.loads(written[name])]
    assert sorted(found) == sorted(f"mindx-dl-deviceinfo-n{number}" for number in range(40))
    last = json.loads(written[pages[0]])
    for key in last:
        world.centre.device(key.removeprefix("mindx-dl-deviceinfo-"), None)
    assert info.update(world.look(), world.now) == {pages[0]: ""}
    world.chips("new")
    assert list(info.update(world.result, world.now)) == [pages[0]], "it is used again"


def test_pages_from_before_a_restart_that_are_not_needed_are_emptied() -> None:
    world = World(make_job())
    info = ClusterInfo()
    info.found(["cluster-info-device-2", "cluster-info-switch-0", "cluster-info-device-x", "other"])
    written = info.update(world.result, world.now)
    assert written["cluster-info-device-0"]
    assert {name for name, text in written.items() if not text} == {
        "cluster-info-device-1", "cluster-info-device-2", "cluster-info-switch-0", "cluster-info-node-cm",
    }  # fmt: skip


def test_a_page_is_no_larger_than_a_config_map_may_be() -> None:
    assert LARGEST == 800 * 1024


@given(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 60))))
def test_pages_hold_every_entry_once_within_their_size(steps: list[tuple[int, int | None]]) -> None:
    pages, truth, texts = Pages(100), {}, {}
    for number, size in steps:
        key = f"k{number}"
        entry = None if size is None else f'"{key}":"{"é" * (size // 2)}"'
        for page in pages.put(key, entry):
            texts[page] = pages.text(page)
        truth[key] = entry
        for page in range(len(pages)):
            assert texts.get(page, "") == pages.text(page), "each page that changes is named"
            assert len(pages.text(page).encode()) <= 100
        kept = [key for page in range(len(pages)) for key in (json.loads(pages.text(page)) if pages.text(page) else {})]
        assert sorted(kept) == sorted(key for key, entry in truth.items() if entry is not None)


def test_an_entry_larger_than_a_page_has_one_for_itself() -> None:
    pages = Pages(10)
    pages.put("a", '"a":"aaaaaaaaaaaa"')
    pages.put("b", '"b":1')
    assert json.loads(pages.text(0)) == {"a": "aaaaaaaaaaaa"} and json.loads(pages.text(1)) == {"b": 1}


def test_a_move_to_another_page_is_written_before_the_old_page() -> None:
    info = ClusterInfo(largest=1300)
    world = World(nodes=2)
    assert len(info.update(world.result, world.now)) == 2, "one page, and that of nodes"
    written = info.update(world.chips("n0", *(chip(0, f"ABCD{number:04}", "SeparateNPU") for number in range(5))), 0)
    assert list(written) == ["cluster-info-device-1", "cluster-info-device-0"]


def test_fault_job_info() -> None:
    pods = {
        rank: Pod(rank, f"u{rank}", f"p{rank}", f"n{rank}", devices=(Device("0", super_id=f"10{rank}"), Device("1")))
        for rank in range(4)
    }
    job = Job("uid", "job", "default", pods=pods, per_pod=2)
    faults = JobFaults("uid", "UnHealthy", (RankFault(2, 1, "u1", "n1"), RankFault(6, 3, "u3", "n3")))
    text = fault_job_info(job, faults, {"n0": 7, "n1": 7, "n2": 8, "n3": -2}, 123)
    assert json.loads(text) == {
        "7": {"SdIds": ["101"], "FaultNodes": {"n1": {}}, "NodeNames": ["n0", "n1"], "FaultTimes": 123, "JobId": "uid"}
    }
    assert fault_job_info(job, JobFaults("uid"), {"n0": 7}, 123) == ""


@pytest.mark.parametrize("ms", [0, 10 * S])
def test_what_is_hidden_from_schedulers_is_not_written(ms: int) -> None:
    world = World(make_job(strategy="retry"))
    world.centre.device("n0", device_data(chip(0, "80E01801", "RestartBusiness")))
    world.look()
    world.at(ms)
    text = ClusterInfo().update(world.result, world.now)["cluster-info-device-0"]
    assert ("80E01801" in text) == (ms > 0)
