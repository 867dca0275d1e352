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

from tests.embedded.api import EmbeddedApi  # noqa: E402
from tests.kube_http import Client  # noqa: E402


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


@pytest.fixture(scope="session")
def minor(server: tuple[str, str, str | None]) -> int:
    """The version, as far as it matters."""
    asking = Client(*server)
    found = int(asking.get("/version").json["minor"].rstrip("+"))
    asking.close()
    return found


@pytest.fixture(autouse=True)
def suitable(request: pytest.FixtureRequest, minor: int) -> None:
    """Against our own server all tests run."""
    if "EVERTRAIN_CONTRACT_URL" in os.environ:
        since = request.node.get_closest_marker("since")
        if since and minor < since.args[0]:
            pytest.skip(f"from Kubernetes 1.{since.args[0]} on; this is 1.{minor}")
        if request.node.get_closest_marker("stricter"):
            pytest.skip("our server is stricter than a real one")


@pytest.fixture
def client(server: tuple[str, str, str | None]) -> Iterator[Client]:
    made = Client(*server)
    yield made
    made.close()


@pytest.fixture
def namespace(client: Client, minor: int) -> Iterator[str]:
    name = f"contract-{secrets.token_hex(4)}"
    client.post("/api/v1/namespaces", {"metadata": {"name": name}}).expect(201)
    if "EVERTRAIN_CONTRACT_URL" in os.environ:
        # A real server takes pods when somebody has made an account for them; before 1.24, when that has a token.
        path = f"/api/v1/namespaces/{name}/serviceaccounts"
        needs = ("secrets",) if minor < 24 else ()
        with client.watch(path, timeout=30, resourceVersion="0") as events:
            accounts = (event["object"] for event in events)
            next(each for each in accounts if each["metadata"]["name"] == "default" and all(n in each for n in needs))
    yield name
    client.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def maps(namespace: str) -> str:
    """The path of the ConfigMaps of a namespace of the test's own."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture
def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"
