"""`evertrain node nics` without a cluster: what it prints, and what it says where there is nothing to count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evertrain.cli import connection, node
from evertrain.embedded.nodestats import Traffic, summary, traffic
from evertrain.embedded.power import NETWORK_STATE, NICS, OFF, ON, STATE, Cables, link
from evertrain.kube.port import Kind, Listing, NotFound, Object

COUNTED = {"nic0": Traffic(1_234_567, 89), "nic1": Traffic(0, 42)}


class Nodes:
    """A cluster of these nodes, by their annotations."""

    def __init__(self, annotations: Mapping[str, Mapping[str, str]], nics: Mapping[str, Traffic]) -> None:
        self._nodes = {name: {"metadata": {"name": name, "annotations": dict(a)}} for name, a in annotations.items()}
        self._nics = nics

    async def get(self, kind: Kind, name: str) -> Object:
        if name not in self._nodes:
            raise NotFound(404, "NotFound", "not found")
        return self._nodes[name]

    async def list(self, kind: Kind, **_: Any) -> Listing:
        return Listing(list(self._nodes.values()), "1")

    async def ask(self, method: str, path: str) -> Object:
        parts = path.split("/")
        assert (method, parts[:4], parts[5:]) == ("GET", ["", "api", "v1", "nodes"], ["proxy", "stats", "summary"])
        return summary(parts[4], "2026-01-02T03:04:05Z", self._nics)

    async def close(self) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def use(nics: Mapping[str, Traffic] = COUNTED, **annotations: Mapping[str, str]) -> None:
        monkeypatch.setattr(connection, "choose_kubeconfig", lambda *_: tmp_path)
        monkeypatch.setattr(connection, "connect", lambda _: Nodes(annotations, nics))

    return use


def test_the_nics_of_all_nodes_that_run(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster(a={STATE: ON, NETWORK_STATE: str(Cables().without("nic1"))}, b={STATE: OFF}, c={})
    assert node.main(["nics"]) == 0
    assert capsys.readouterr().out == (
        "NODE   NIC    LINK   RECEIVED   SENT\na      nic0   up     1234567    89\na      nic1   down   0          42\n"
    )
    assert node.main(["nics", "a", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"node": "a", "nic": "nic0", "link": "up", "received": 1_234_567, "sent": 89},
        {"node": "a", "nic": "nic1", "link": "down", "received": 0, "sent": 42},
    ]


@pytest.mark.parametrize(
    ("arguments", "nics", "code", "said"),
    [
        ([], {}, 1, "a has no NICs of its own: its pods are in the network of this machine"),
        (["b"], COUNTED, 1, "b is stopped: nobody counts there"),
        (["c"], COUNTED, 2, "c is not a virtual node"),
        (["d"], COUNTED, 2, "there is no node d; `evertrain node list` names them"),
    ],
)
def test_nothing_to_count(
    cluster: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], nics: Any, code: int, said: str
) -> None:
    cluster(nics, a={STATE: ON}, b={STATE: OFF}, c={})
    assert node.main(["nics", *arguments]) == code
    assert said in capsys.readouterr().err


def test_no_node_runs(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster(a={STATE: OFF})
    assert node.main(["nics"]) == 1
    assert "no virtual node runs" in capsys.readouterr().err


def test_a_summary_says_what_was_counted() -> None:
    told = summary("a", "now", COUNTED)
    assert told["node"]["network"]["name"] == "nic0", "the first one stands for the node, as with a kubelet"
    assert traffic(told) == COUNTED
    assert traffic(summary("a", "now", {})) == {}


def test_which_links_are_up() -> None:
    assert [link(str(Cables().without("nic0")), nic) for nic in NICS] == ["down", "up"]
    assert [link(state, nic) for state in ("", "cut", "joined") for nic in NICS] == ["up"] * 6
