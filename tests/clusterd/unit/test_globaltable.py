"""The rank table of a MindIE service, from those of its servers and from its coordinators and controllers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evertrain.clusterd.jobs.globaltable import BadTable, assemble, read_table, service_of
from evertrain.kube.port import Object

GROUP, SERVER = "grt-group/deploy-server", "grt-server/deploy-server"


def pod(name: str, number: int, **more: Any) -> Object:
    status = {"phase": "Running", "hostIP": f"10.0.0.{number}", "podIP": f"172.16.0.{number}"}
    return {"metadata": {"name": name}, "status": status | more}


def device(number: int, **more: str) -> dict[str, str]:
    return {"device_id": str(number), "device_ip": f"192.168.1.{number}", "rank_id": str(number), **more}


def config(name: str, content: object, labels: dict[str, str] | None = None) -> Object:
    text = content if isinstance(content, str) else json.dumps(content)
    return {
        "metadata": {"name": f"rings-config-{name}", "labels": {"jobID": "chat", **({GROUP: "2"} | (labels or {}))}},
        "data": {"hccl.json": text},
    }


def own(number: int, status: str = "completed", **more: Any) -> dict[str, Any]:
    server = {
        "device": [device(4), device(5)],
        "hardware_type": "800I-A2-64G",
        "server_id": f"10.0.1.{number}",
        "host_ip": f"10.0.1.{number}",
        "container_ip": f"172.16.1.{number}",
    }
    return {"status": status, "server_list": [server], "server_count": "1", "version": "1.0", **more}


def tables(*items: Object) -> list[Any]:
    return [found for item in items if (found := read_table(item)) is not None]


def test_a_service_of_two_servers() -> None:
    super_pods = [{"super_pod_id": "0", "server_list": [{"server_id": "10.0.1.2"}]}]
    text = assemble(
        [pod("coordinator-0", 1)],
        [pod("controller-1", 3), pod("controller-0", 2)],
        tables(config("server-10", own(2, super_pod_list=super_pods)), config("server-2", own(1))),
    )
    assert text is not None
    expected = (
        '{"version":"1.0","status":"completed","server_group_list":['
        '{"group_id":"0","server_count":"1","server_list":[{"server_id":"10.0.0.1","server_ip":"172.16.0.1"}]},'
        '{"group_id":"1","server_count":"2","server_list":[{"server_id":"10.0.0.2","server_ip":"172.16.0.2"},'
        '{"server_id":"10.0.0.3","server_ip":"172.16.0.3"}]},'
    )
    assert text.startswith(expected)
    second, third = json.loads(text)["server_group_list"][2:]
    assert list(second) == ["group_id", "deploy_server", "server_count", "server_list"]
    assert (second["group_id"], second["deploy_server"], second["server_count"]) == ("2", "2", "1")
    assert second["server_list"] == [
        {
            "device": [
                {"device_id": "4", "device_ip": "192.168.1.4", "device_logical_id": "0", "rank_id": "4"},
                {"device_id": "5", "device_ip": "192.168.1.5", "device_logical_id": "1", "rank_id": "5"},
            ],
            "server_id": "10.0.1.1",
            "server_ip": "172.16.1.1",
            "hardware_type": "800I-A2-64G",
        }
    ]
    assert (third["group_id"], third["super_pod_list"]) == ("3", super_pods)


def test_chips_of_a_super_pod_keep_their_number_in_it() -> None:
    content = own(1)
    content["server_list"][0]["device"] = [device(0, super_device_id="37748736")]
    text = assemble([pod("a", 1)], [pod("b", 2)], tables(config("s", content))) or ""
    [found] = json.loads(text)["server_group_list"][2]["server_list"][0]["device"]
    assert list(found) == ["device_id", "device_ip", "super_device_id", "device_logical_id", "rank_id"]


def test_nothing_is_told_before_all_is_there() -> None:
    ready = tables(config("s", own(1)))
    assert assemble([pod("a", 1)], [pod("b", 2)], ready)
    assert assemble([pod("a", 1)], [pod("b", 2)], []) is None, "no server"
    assert assemble([], [pod("b", 2)], ready) is None, "no coordinator"
    assert assemble([pod("a", 1)], [], ready) is None, "no controller"
    assert assemble([pod("a", 1, podIP="")], [pod("b", 2)], ready) is None, "no address yet"
    assert assemble([pod("a", 1)], [pod("b", 2), pod("c", 3, hostIP=None)], ready) is None


def test_pods_on_their_way_out_are_no_part_of_it() -> None:
    going = pod("a", 8)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found = assemble([going, pod("b", 1)], [pod("c", 2), pod("d", 3, phase="Failed")], tables(config("s", own(1))))
    groups = json.loads(found or "")["server_group_list"]
    assert [[server["server_id"] for server in group["server_list"]] for group in groups[:2]] == [
        ["10.0.0.1"],
        ["10.0.0.2"],
    ]
    assert assemble([going], [pod("c", 2)], tables(config("s", own(1)))) is None


@pytest.mark.parametrize("content", ['{"status":"initializing"}', "{}", "", {"status": "complete", "server_list": []}])
def test_tables_that_are_not_complete(content: object) -> None:
    assert read_table(config("s", content)) is None
    assert read_table({"metadata": {"name": "rings-config-s"}}) is None


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '"completed"', "null", {"status": 1}, own(1, server_list=[{"device": [{"device_id": 3}]}]),
     own(1, super_pod_list=[{}]), "[" * 100_000, '{"status":"\\ud800"}'],
)  # fmt: skip
def test_tables_that_nobody_can_read(content: object) -> None:
    with pytest.raises(BadTable, match=r"rings-config-s: hccl\.json can't be read"):
        read_table(config("s", content))


def test_who_deploys_is_said_once() -> None:
    both = config("s", own(1), {SERVER: "1"})
    none = config("s", own(1))
    del none["metadata"]["labels"][GROUP]
    for item in (both, none):
        with pytest.raises(BadTable, match="one of the labels"):
            read_table(item)
    alone = config("s", own(1), {SERVER: "7"})
    del alone["metadata"]["labels"][GROUP]
    found = read_table(alone)
    assert found is not None and found.deploy == "7"


def test_which_service_it_is_of() -> None:
    assert service_of(config("s", "")) == "chat"
    assert service_of({"metadata": {"name": "rings-config-s"}}) is None
    assert service_of({"metadata": {"name": "mindx-dl-deviceinfo-x", "labels": {"jobID": "chat"}}}) is None
