from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.embedded import Up, small_job


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A cluster for all tests that leave it as they found it."""
    cluster = Up(tmp_path_factory.mktemp("cluster"), "--node-label", "example-key=example-value")
    try:
        # The nodes have then started what lasts as long as they do, and a test isn't blamed for it.
        cluster.kubectl("apply", "-f", "-", stdin=small_job("first", "true", npus=8))
        cluster.kubectl("wait", "--for=condition=Succeeded", "acjob/first", "--timeout=60s")
        cluster.kubectl("delete", "acjob", "first")
        yield cluster
    finally:
        assert cluster.end() == 0, cluster.lines
