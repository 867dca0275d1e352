"""What schedulers are told about the health of nodes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.kube.port import Object
from evertrain.wire.clusterinfo import WELL, Health, Reports, read
from tests.clusterd.cluster_info import devices, node, switch, texts


@pytest.mark.parametrize(
    ("chips", "expected"),
    [
        (devices(), WELL),
        (devices(["Ascend910-1"]), Health(unhealthy=frozenset({"Ascend910-1"}))),
        (devices(network=["Ascend910-1"]), Health(closed=frozenset({"Ascend910-1"}))),
        (devices(faults=[("Ascend910-2", "PreSeparateNPU")]), Health(closed=frozenset({"Ascend910-2"}))),
        (devices(faults=[("Ascend910-2", "SubHealthFault")]), Health(sub_healthy=frozenset({"Ascend910-2"}))),
        (devices(faults=[("Ascend910-2", "NotHandleFault")]), WELL),
        (devices(["npu-3"], type="npu"), Health(unhealthy=frozenset({"npu-3"}))),
    ],
)
def test_chips(chips: Object, expected: Health) -> None:
    assert read(texts({"a": chips})).get("a", WELL) == expected


@pytest.mark.parametrize(
    ("nodes", "switches", "expected"),
    [
        (node(), switch(), WELL),
        (node("UnHealthy", "SeparateFault"), None, Health("UnHealthy")),
        (node("Healthy", "PreSeparateFault"), None, Health(leaving=True)),
        (node("PreSeparate", "PreSeparateFault"), None, Health(leaving=True)),
        (node("UnHealthy", "PreSeparateFault"), None, Health(leaving=True)),
        (None, switch("UnHealthy", "PreSeparate"), Health(leaving=True)),
        (None, switch("UnHealthy", "Separate"), Health(switch="UnHealthy")),
        (None, switch("SubHealthy", "SubHealthFault"), Health(switch="SubHealthy")),
        (node("Healthy", "PreSeparateFault"), switch("Healthy", "NotHandle"), Health(leaving=True)),
        (node(), switch("Healthy", "PreSeparate"), Health(leaving=True)),
    ],
)
def test_nodes_and_switches(nodes: Object | None, switches: Object | None, expected: Health) -> None:
    found = read(texts(nodes={"a": nodes} if nodes else {}, switches={"a": switches} if switches else {}))
    assert found.get("a", WELL) == expected


def test_what_is_said_in_several_texts_adds_up() -> None:
    found = read(texts({"a": devices(["Ascend910-0"])}, {"a": node("UnHealthy")}, {"a": switch("SubHealthy")}))
    assert found == {"a": Health("UnHealthy", "SubHealthy", frozenset({"Ascend910-0"}))}
    assert found["a"].lost
    assert found["a"].is_sub_healthy


@given(st.dictionaries(st.sampled_from(list(texts())), st.text() | st.sampled_from(["", "[]", "{}", "null", "1"])))
def test_texts_that_nobody_can_read_say_nothing(found: dict[str, str]) -> None:
    assert read(found) == {}


@pytest.mark.parametrize(
    "part", [None, 1, [], "x", {"DeviceList": 3}, {"DeviceList": {"huawei.com/Ascend910-Fault": "["}}]
)
def test_a_node_that_nobody_can_read_does_not_hide_the_others(part: object) -> None:
    entries = {"mindx-dl-deviceinfo-a": part, "mindx-dl-deviceinfo-b": devices(["Ascend910-0"])}
    assert set(read({"cluster-info-device-0": json.dumps(entries)})) == {"b"}


def test_only_nodes_whose_health_is_another_are_news() -> None:
    reports = Reports()
    first = texts({"a": devices(["Ascend910-0"]), "b": devices()})["cluster-info-device-0"]
    assert reports.update("cluster-info-device-0", first) == {"a"}
    assert reports.update("cluster-info-device-0", first.replace('"UpdateTime": 1', '"UpdateTime": 2')) == set()
    assert reports.update("cluster-info-node-cm", texts(nodes={"a": node("UnHealthy")})["cluster-info-node-cm"]) == {
        "a"
    }
    assert reports.health == {"a": Health("UnHealthy", unhealthy=frozenset({"Ascend910-0"}))}
    # A node may move from one page to another, and be on both for a moment.
    assert reports.update("cluster-info-device-1", first) == set()
    assert reports.update("cluster-info-device-0", "") == set()
    assert reports.update("cluster-info-device-1", "") == {"a"}
    assert reports.update("cluster-info-node-cm", "") == {"a"}
    assert reports.health == {}
