"""Tests on a real Kubernetes: that of `python -m tests.kubernetes_cluster`, or any other by KUBECONFIG.

`make test-kubernetes` starts the first, or with KUBECONFIG takes the other. What needs more than an API (to pull a
cable, to see this machine's files in a pod) is left out where it is not ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusterd.chain import NAME, Chain
from tests.kubernetes.real import OVERLAY, PARTS, Real, RealJob
from tests.kubernetes_cluster.cluster import CONTROL, order

LIMIT = 600
OURS = CONTROL in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT))
            if item.get_closest_marker("own_cluster") and not OURS:
                item.add_marker(pytest.mark.skip("needs the cluster that `make test-kubernetes` starts"))


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """The cluster."""
    if "KUBECONFIG" not in os.environ:
        pytest.fail("no KUBECONFIG; `make test-kubernetes` starts a cluster", pytrace=False)
    return Real(tmp_path_factory.mktemp("real"), os.environ["KUBECONFIG"])


@pytest.fixture(scope="session")
def parts(real: Real) -> Real:
    """With operator, ClusterD and noded, from deploy/; on somebody's own cluster as they have installed them."""
    if OURS:
        real.kubectl("apply", "-k", OVERLAY)
    for part in PARTS:
        real.kubectl("rollout", "status", "-n", "mindx-dl", part, "--timeout=240s")
    real.kubectl("wait", "--for=condition=Established", "crd/ascendjobs.mindxdl.gitee.com")
    return real


@pytest.fixture
def nodes(real: Real) -> Iterator[list[str]]:
    """Names of three nodes that all work, also after the test."""
    names = sorted(each["metadata"]["name"] for each in real.get("nodes")["items"])
    yield names
    if OURS:
        for name in names:
            order("repair", node=name)


@pytest.fixture
def chain(parts: Real, nodes: list[str], tmp_path: Path) -> Iterator[Chain]:
    """A job of two pods; strategies and labels are to be set before it starts."""
    made = Chain(parts, RealJob(tmp_path / "job", ""))
    try:
        yield made
    finally:
        parts.kubectl("delete", "acjob", NAME, "--ignore-not-found", "--timeout=120s")
        parts.kubectl("delete", "pods", "-l", f"job-name={NAME}", "--force", "--grace-period=0", "--ignore-not-found")
        parts.kubectl("delete", "configmap", f"reset-config-{NAME}", "--ignore-not-found")
