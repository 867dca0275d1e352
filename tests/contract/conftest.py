"""The contract of the API, against any server.

EVERTRAIN_CONTRACT_URL, EVERTRAIN_CONTRACT_TOKEN and EVERTRAIN_CONTRACT_CA (a file) name one; its user must be a cluster
administrator. Without them an embedded server is started.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from embedded_api import EmbeddedApi  # noqa: E402
from kube_http import Client  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str | None]]:
    """URL, token and CA file."""
    url = os.environ.get("EVERTRAIN_CONTRACT_URL")
    if url:
        yield url, os.environ["EVERTRAIN_CONTRACT_TOKEN"], os.environ.get("EVERTRAIN_CONTRACT_CA")
        return
    folder: Path = tmp_path_factory.mktemp("contract")
    # A server that has lived for a while: its history does not reach back to version 1.
    with EmbeddedApi(folder, first_version=1000) as running:
        yield running.url, running.credentials.token, str(running.credentials.authority)


@pytest.fixture
def client(server: tuple[str, str, str | None]) -> Iterator[Client]:
    made = Client(*server)
    yield made
    made.close()


@pytest.fixture
def namespace(client: Client) -> Iterator[str]:
    name = f"contract-{secrets.token_hex(4)}"
    client.post("/api/v1/namespaces", {"metadata": {"name": name}}).expect(201)
    # A real server needs a moment before it takes objects in a new namespace; this asks for none of its accounts.
    yield name
    client.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def maps(namespace: str) -> str:
    """The path of the ConfigMaps of a namespace of the test's own."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture
def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"
