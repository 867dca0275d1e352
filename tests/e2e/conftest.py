from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.embedded import Up, small_job

LIMIT = 600
"""Seconds for a test with whole jobs, some of which other jobs share the cores with."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))


@pytest.fixture
def up(shared_cluster: Up) -> Iterator[Up]:
    """A cluster for all tests that leave it as they found it; if one fails, its jobs are nobody else's trouble."""
    yield shared_cluster
    if jobs := shared_cluster.kubectl("get", "acjob", "-o", "name").stdout.split():
        shared_cluster.kubectl("delete", *jobs)
        shared_cluster.kubectl("wait", "--for=delete", "pods", "--all", "--timeout=200s")


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    cluster = Up(tmp_path_factory.mktemp("cluster"), "--node-label", "example-key=example-value")
    try:
        # The nodes have then started what lasts as long as they do, and a test isn't blamed for it.
        cluster.kubectl("apply", "-f", "-", stdin=small_job("first", "true", npus=8))
        cluster.kubectl("wait", "--for=condition=Succeeded", "acjob/first", "--timeout=200s")
        cluster.kubectl("delete", "acjob", "first")
        yield cluster
    finally:
        assert cluster.end() == 0, cluster.lines
