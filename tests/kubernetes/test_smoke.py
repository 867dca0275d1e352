"""That the cluster is one: nodes, pods, their network, Services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.real import Real

SERVE = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8080)"
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=60).status)"


@pytest.fixture
def pods(real: Real, nodes: list[str]) -> Iterator[list[str]]:
    """One on each node; it serves its files."""
    names = [f"smoke-{node}" for node in nodes]
    try:
        for name, node in zip(names, nodes, strict=True):
            real.run_pod(name, "python", "-c", SERVE, node=node, labels=", smoke: pods")
        real.kubectl("wait", "--for=condition=Ready", "pods", "-l", "smoke=pods", "--timeout=180s")
        yield names
    finally:
        real.kubectl("delete", "pods,services", "-l", "made-by=test", "--force", "--grace-period=0")


def ask(real: Real, pod: str, url: str) -> str:
    return real.kubectl("exec", pod, "--", "python", "-c", ASK, url).stdout.strip()


def test_nodes_are_ready(real: Real, nodes: list[str]) -> None:
    assert len(nodes) >= 3
    real.kubectl("wait", "--for=condition=Ready", *(f"node/{name}" for name in nodes), "--timeout=60s")


def test_pods_of_different_nodes_reach_each_other(real: Real, pods: list[str]) -> None:
    addresses = [real.get("pod", name)["status"]["podIP"] for name in pods]
    assert len(set(addresses)) == len(pods)
    for pod in pods:
        for address in addresses:
            assert ask(real, pod, f"http://{address}:8080/") == "200", f"{pod} to {address}"


def test_a_service_is_reached_from_every_node(real: Real, pods: list[str]) -> None:
    real.kubectl("apply", "-f", "-", stdin="""\
apiVersion: v1
kind: Service
metadata: {name: smoke, labels: {made-by: test}}
spec:
  selector: {smoke: pods}
  ports: [{port: 80, targetPort: 8080}]
""")  # fmt: skip
    real.until(lambda found: str(found).count("'ip':") == len(pods), "endpoints", "smoke")
    address = real.get("service", "smoke")["spec"]["clusterIP"]
    for pod in pods:
        assert ask(real, pod, f"http://{address}/") == "200", pod


def test_what_a_pod_prints_and_how_it_ended(real: Real) -> None:
    real.run_pod("ends", "sh", "-c", "echo here; exit 3")
    try:
        real.until(lambda pod: pod["status"]["phase"] == "Failed", "pod", "ends")
        assert real.kubectl("logs", "ends").stdout == "here\n"
        (status,) = real.get("pod", "ends")["status"]["containerStatuses"]
        assert status["state"]["terminated"]["exitCode"] == 3
    finally:
        real.kubectl("delete", "pod", "ends", "--force", "--grace-period=0")
