from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from evertrain.taskd import environment
from evertrain.taskd import log as logs
from evertrain.taskd.manager import api
from taskd.api import init_taskd_manager, start_taskd_manager

GOOD: dict[str, Any] = {"job_id": "job-1", "node_nums": 2, "proc_per_node": 8}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    for name in ("TASKD_PROCESS_ENABLE", "PROCESS_RECOVER", "MINDX_SERVER_IP", "POD_IP", "LOCAL_PROXY_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(api, "taskd_manager", None)
    # The first call in a process takes TaskD's words away from the root logger.
    ours = logging.getLogger(logs.OURS)
    monkeypatch.setattr(ours, "propagate", False)
    ours.addHandler(caplog.handler)
    yield
    ours.removeHandler(caplog.handler)


def prepared(config: dict[str, Any]) -> Any:
    assert init_taskd_manager(config)
    return api.taskd_manager


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCESS_RECOVER", "on")
    monkeypatch.setenv("TASKD_PROCESS_ENABLE", "off")
    monkeypatch.setenv("POD_IP", "127.0.0.9")
    monkeypatch.setenv("MINDX_SERVER_IP", "10.0.0.1")
    config = {**GOOD, "taskd_enable": "on"}
    made = prepared(config)
    assert (config["taskd_enable"], config["fault_recover"]) == ("off", "on"), "it is told what was made of it"
    assert (made.recovers_processes, made.enabled, made.listen, made.clusterd) == (
        True, False, "127.0.0.9:9601", "10.0.0.1:8899",
    )  # fmt: skip


@pytest.mark.parametrize(
    "infos", [{"ip": "10.1.1.1", "port": "8899", "name": "clusterd", "role": "x"}, [{"ip": "10.1.1.1", "port": "8899"}]]
)
def test_clusterd_may_be_named_as_a_dict_or_in_a_list(infos: Any) -> None:
    assert prepared({**GOOD, "cluster_infos": infos}).clusterd == "10.1.1.1:8899"


def test_clusterd_has_the_usual_port_if_none_is_named() -> None:
    assert prepared({**GOOD, "cluster_infos": {"ip": "10.1.1.1"}}).clusterd == "10.1.1.1:8899"


@pytest.mark.parametrize("address", ["fd00::7", "[fd00::7]"])
def test_addresses_of_ipv6(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("POD_IP", address)
    monkeypatch.setenv("MINDX_SERVER_IP", address)
    made = prepared(dict(GOOD))
    assert (made.listen, made.clusterd) == ("[fd00::7]:9601", "[fd00::7]:8899")


@pytest.mark.parametrize("address", ["0.0.0.0", "1.2.3.4.5", "224.0.0.1", "a", "under_score", "-x-"])
def test_a_clusterd_that_is_nowhere_is_not_asked(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("MINDX_SERVER_IP", address)
    made = prepared(dict(GOOD))
    assert made.clusterd == "" and address in made.no_clusterd
    assert made.no_clusterd.startswith("MINDX_SERVER_IP: ")


def test_a_clusterd_that_the_script_has_put_nowhere_is_not_asked() -> None:
    made = prepared({**GOOD, "cluster_infos": {"ip": "0.0.0.0"}})
    assert made.clusterd == "" and made.no_clusterd.startswith("cluster_infos: ")


def test_a_job_without_clusterd_has_nothing_wrong_with_it() -> None:
    made = prepared(dict(GOOD))
    assert made.clusterd == made.no_clusterd == ""


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "224.0.0.1", "not an address"])
def test_the_manager_listens_on_one_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    monkeypatch.setenv("POD_IP", address)
    assert not init_taskd_manager(dict(GOOD))
    assert "POD_IP" in caplog.text


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, "127.0.0.1"), ({"POD_IP": "10.1.2.3"}, "127.0.0.1"), ({"POD_IP": "127.0.0.7"}, "127.0.0.7"),
        ({"POD_IP": "::1"}, "[::1]"), ({"POD_IP": "127.0.0.7", "TASKD_PROXY_IP": "127.0.0.8"}, "127.0.0.8"),
        ({"POD_IP": "nonsense"}, "127.0.0.1"),
    ],
)  # fmt: skip
def test_where_the_proxy_of_a_pod_listens(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.proxy_host() == host


@pytest.mark.parametrize(
    ("variable", "function", "values"),
    [
        ("HCCL_CONNECT_TIMEOUT", environment.pause_timeout,
         {"": 600, "x": 600, "0": 600, "-5": 600, "100": 250, "3": 7, "5000": 7200, "9" * 5000: 600}),
        ("TASKD_REPORT_FAULT_TIMEOUT", environment.report_fault_timeout,
         {"": None, "299": None, "300": 300, "600": 600, "601": None, "x": None, "9" * 5000: None}),
        ("TASKD_MANAGER_PORT", environment.manager_port, {"": 9601, "0": 9601, "65536": 9601, "70": 70}),
        ("TASKD_PROXY_PORT", environment.proxy_port, {"": 9602, "-1": 9602, "70": 70}),
        ("TASKD_PROCESS_ENABLE", environment.process_enable, {"": True, "on": True, "off": False, "OFF": True}),
        ("PROCESS_RECOVER", environment.process_recover, {"": False, "on": True, "ON": False, "1": False}),
        ("HIGH_AVAILABILITY", environment.elastic_training,
         {"": False, "recover": False, "recover, elastic-training": True}),
        ("ENABLE_RESTART_FAULT_PROCESS", environment.in_place, {"": False, "on": True}),
    ],
)  # fmt: skip
def test_what_the_environment_means(
    monkeypatch: pytest.MonkeyPatch, variable: str, function: Any, values: dict[str, Any]
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert function() == values[""]
    for text, value in values.items():
        monkeypatch.setenv(variable, text)
        assert function() == value, text


def test_what_is_no_number_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    environment._tell_unusable.cache_clear()
    monkeypatch.setenv("TASKD_MANAGER_PORT", "abc")
    assert [environment.manager_port() for _ in range(3)] == [9601] * 3
    assert caplog.messages == ["TASKD_MANAGER_PORT: a number from 1 to 65535 is needed, not 'abc'; 9601 is taken"]


def test_everything_goes_over_the_proxy_beside_us_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_PROXY_ENABLE", "on")
    monkeypatch.setenv("POD_IP", "10.0.0.9")
    monkeypatch.setenv("MINDX_SERVER_IP", "10.0.0.1")
    made = prepared(dict(GOOD))
    assert (made.listen, made.clusterd) == ("127.0.0.1:9601", "127.0.0.1:8899")


def test_the_first_configuration_stays() -> None:
    prepared(dict(GOOD))
    assert init_taskd_manager({**GOOD, "job_id": "another"})
    assert api.taskd_manager is not None and api.taskd_manager.job == "job-1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"job_id": None}, "MINDX_TASK_ID"), ({"node_nums": "2"}, "node_nums"), ({"proc_per_node": 0}, "proc_per_node"),
        ({"node_nums": 5001}, "up to 5000 nodes"), ({"proc_per_node": 500_001}, "not 2 with 1000002"),
        ({"node_nums": True}, "node_nums"), ({"plugin_dir": 7}, "plugin_dir"),
        ({"cluster_infos": ["x"]}, "cluster_infos"),
        ({"cluster_infos": {"ip": "10.1.1.1", "port": "grpc"}}, "cluster_infos: invalid port: grpc"),
        ({"cluster_infos": [{"ip": "10.1.1.1", "port": 70000}]}, "cluster_infos: invalid port: 70000"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused_with_its_reason(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not init_taskd_manager({**GOOD, **change})
    assert reason in caplog.text


def test_a_folder_of_plugins_that_can_not_be_used_does_not_keep_a_job_from_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is a key that the original ignores, and a job without a manager ends."""
    assert init_taskd_manager({**GOOD, "plugin_dir": "/nowhere/at/all"})
    assert "no plugins: plugin_dir /nowhere/at/all: no such folder" in caplog.text


def test_start_without_init(caplog: pytest.LogCaptureFixture) -> None:
    assert start_taskd_manager() is False
    assert "Manager is not initialized. Please call init_manager first." in caplog.text
