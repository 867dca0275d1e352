from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.embedded import Up


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A cluster for all tests that leave it as they found it."""
    cluster = Up(tmp_path_factory.mktemp("cluster"), "--node-label", "example-key=example-value")
    try:
        yield cluster
    finally:
        assert cluster.end() == 0, cluster.lines
