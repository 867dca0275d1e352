"""Where the agents of several nodes meet."""

from __future__ import annotations

import logging

import pytest

from evertrain.taskd.agent import common, torch_private
from evertrain.taskd.agent.meeting import hosts_store


@pytest.mark.parametrize("endpoint", ["127.0.0.2:29400", "localhost:29400", "[::1]:29400", "127.0.0.2"])
def test_of_pods_that_share_a_machine_the_first_has_the_store_whoever_comes_first(endpoint: str) -> None:
    assert hosts_store(endpoint, "127.0.0.2", "0") is True
    assert hosts_store(endpoint, "127.0.0.3", "1") is False


@pytest.mark.parametrize(
    ("endpoint", "pod_ip", "rank"),
    [
        ("10.0.0.1:29400", "10.0.0.1", "0"),  # addresses tell pods apart
        ("127.0.0.2:29400", "10.0.0.1", "1"),  # a proxy beside the pod
        ("10.0.0.1:29400", "127.0.0.2", "1"),
        ("job-master:29400", "127.0.0.2", "1"),
        ("127.0.0.2:29400", "", "1"),
        ("127.0.0.2:29400", "127.0.0.3", ""),  # nobody says which pod this is
        ("", "127.0.0.3", "1"),
    ],
)
def test_elsewhere_torchrun_sees_for_itself(endpoint: str, pod_ip: str, rank: str) -> None:
    assert hosts_store(endpoint, pod_ip, rank) is None


def test_who_looks_at_an_agent_without_a_manager_is_told_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "SILENT", 0.1)
    monkeypatch.setattr(common, "JOIN_LIMIT", 0.2)
    reporter = common.Reporter("0", "127.0.0.1:1", lambda: None)
    try:
        with pytest.raises(ConnectionError, match="is manager.py running"):
            reporter.start()
    finally:
        reporter.close()
    assert "taskd: the manager is waited for: is manager.py running on the first node" in capfd.readouterr().err


def test_torchrun_names_the_process_that_failed_by_its_rank_on_the_node(caplog: pytest.LogCaptureFixture) -> None:
    torchrun = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    line = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
    with torch_private._as_it_is(3):
        torchrun.error(line, -9, 0, 77, "python")
        torchrun.error("something else")
    torchrun.error(line, -9, 0, 77, "python")
    assert caplog.messages == [
        "failed (exitcode: -9) local_rank: 3 (pid: 77) of binary: python",
        "something else",
        "failed (exitcode: -9) local_rank: 0 (pid: 77) of binary: python",
    ]
