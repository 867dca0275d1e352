"""Putting the cluster together: what keeps it from starting, parts that fail, kinds that are brought up to date."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest
from cryptography import x509

from evertrain import aio
from evertrain.embedded import certificates, cluster, instance, volcano
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.certificates import credentials
from evertrain.embedded.cluster import CannotStart, Cluster, Settings
from evertrain.embedded.network import choice
from evertrain.embedded.network.fabric import Fabric, NotAllowed
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import NotStored, Store
from evertrain.kube.port import CUSTOM_RESOURCE_DEFINITION, QUEUE


def refusal(settings: Settings) -> str:
    async def start() -> None:
        async with Cluster(settings):
            pass

    with pytest.raises(CannotStart) as caught:
        aio.run(start())
    return str(caught.value)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(Settings(tmp_path / "file")) == f"{tmp_path / 'file'}: File exists"


def test_a_damaged_database(tmp_path: Path) -> None:
    (tmp_path / "objects.db").write_bytes(b"neither" * 100)
    assert "objects.db can't be used: file is not a database" in refusal(Settings(tmp_path))
    assert instance.find(tmp_path) is None  # and nothing is held back


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal(Settings(tmp_path, port=port)) == f"port {port} can't be used: Address already in use"


def test_the_port_is_that_of_the_last_time_if_it_is_free(tmp_path: Path) -> None:
    def start() -> int:
        async def scenario() -> int:
            async with Cluster(Settings(tmp_path, nodes=0)):
                found = instance.find(tmp_path)
                assert found is not None
                return urlsplit(found.server).port or 0

        return aio.run(asyncio.wait_for(scenario(), 30))

    port = start()
    assert start() == port
    with socket.create_server(("127.0.0.1", port)):
        assert start() != port


@pytest.mark.parametrize("text", ["clusters: [{name: production}]\n", "clusters: 3\n", "just text", "{"])
def test_a_kubeconfig_of_others_is_not_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    assert f"{file} is not a kubeconfig of this cluster" in refusal(Settings(tmp_path / "data", kubeconfig=file))
    assert file.read_text() == text


def test_a_directory_in_use(tmp_path: Path) -> None:
    with instance.Claim(tmp_path):
        assert "already runs" in refusal(Settings(tmp_path))


def test_kinds_of_an_older_version_are_brought_up_to_date() -> None:
    async def scenario() -> None:
        api = Api(Store(None), Registry.builtin())
        bootstrap(api)
        kube = LocalKube(api)
        await cluster.install(kube)
        name = "ascendjobs.mindxdl.gitee.com"
        definition = await kube.get(CUSTOM_RESOURCE_DEFINITION, name)
        wanted = definition["spec"]
        old = {**wanted, "names": {**wanted["names"], "shortNames": ["old"]}}
        await kube.replace(CUSTOM_RESOURCE_DEFINITION, definition | {"spec": old})
        await kube.patch(QUEUE, "default", None, {"spec": {"weight": 7}})
        await cluster.install(kube)
        assert (await kube.get(CUSTOM_RESOURCE_DEFINITION, name))["spec"] == wanted
        queue = await kube.get(QUEUE, "default")
        assert queue["spec"]["weight"] == 7 and queue["status"]["state"] == "Open"  # the user's own stays

    aio.run(asyncio.wait_for(scenario(), 20))


def test_a_queue_whose_maker_was_killed_halfway_is_opened() -> None:
    async def scenario() -> None:
        api = Api(Store(None), Registry.builtin())
        bootstrap(api)
        kube = LocalKube(api)
        await cluster.install(kube)
        await kube.delete(QUEUE, "default")
        await kube.create(QUEUE, volcano.default_queue())  # a create takes no status
        assert "status" not in await kube.get(QUEUE, "default")
        await cluster.install(kube)
        assert (await kube.get(QUEUE, "default"))["status"]["state"] == "Open"

    aio.run(asyncio.wait_for(scenario(), 20))


def test_a_part_that_fails_is_made_anew(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "FIRST_DELAY", 0.0)
    made: list[int] = []
    third = asyncio.Event()

    class Part:
        async def run(self) -> None:
            made.append(len(made))
            if len(made) == 1:
                raise RuntimeError("a defect")
            if len(made) == 2:
                return
            third.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with cluster._running({"scheduler": Part}):
            await third.wait()

    aio.run(asyncio.wait_for(scenario(), 10))
    assert "the scheduler has failed" in caplog.text and "the scheduler has ended by itself" in caplog.text


@pytest.mark.parametrize(
    ("nodes", "npus", "text"),
    [(2, 8, "2 nodes with 8 NPUs each"), (1, 1, "1 node with 1 NPU"), (3, 0, "3 nodes with no NPUs")],
)
def test_the_size_in_words(nodes: int, npus: int, text: str) -> None:
    assert Settings(Path(), nodes=nodes, npus=npus).text() == text


def test_a_disk_without_room_is_no_reason_to_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(cluster, "Store", full)
    assert refusal(Settings(tmp_path)) == f"{tmp_path / 'objects.db'} can't be used: database or disk is full"


def test_nor_is_one_that_is_full_a_moment_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise NotStored("the change can't be stored: database or disk is full")

    monkeypatch.setattr(Store, "_write", full)
    wanted = f"{tmp_path / 'objects.db'} can't be used: the change can't be stored: database or disk is full"
    assert refusal(Settings(tmp_path)) == wanted
    monkeypatch.setattr(cluster, "bootstrap", lambda api: None)
    assert wanted in refusal(Settings(tmp_path))


def test_an_empty_token_lets_nobody_in(tmp_path: Path) -> None:
    first = credentials(tmp_path)
    assert credentials(tmp_path) == first
    (tmp_path / "token").write_text("\n")
    again = credentials(tmp_path)
    assert len(again.token) > 30 and again.token != first.token
    assert (tmp_path / "token").read_text() == again.token
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


def test_no_certificate_outlives_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the new authority and the certificate that it signs."""
    credentials(tmp_path)
    (tmp_path / "ca.key").unlink()
    make = certificates._make_authority

    def killed(*where: Path) -> None:
        make(*where)
        raise KeyboardInterrupt

    monkeypatch.setattr(certificates, "_make_authority", killed)
    with pytest.raises(KeyboardInterrupt):
        credentials(tmp_path)
    monkeypatch.undo()
    keys = credentials(tmp_path)
    authority, server = (
        x509.load_pem_x509_certificate(path.read_bytes()) for path in (keys.authority, keys.certificate)
    )
    server.verify_directly_issued_by(authority)


def started(settings: Settings) -> Cluster:
    async def start() -> Cluster:
        async with Cluster(settings) as cluster:
            return cluster

    return aio.run(start())


@pytest.mark.parametrize(
    ("user", "remedy"), [(1000, "run the cluster as root, or allow user namespaces"), (0, "allow namespaces")]
)
@pytest.mark.parametrize("wanted", [None, True, False])
def test_where_networks_are_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool | None, user: int, remedy: str
) -> None:
    asked = []

    async def refuse(last: str) -> NoReturn:
        asked.append(last)
        raise NotAllowed("unshare: Operation not permitted")

    monkeypatch.setattr(Fabric, "start", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    settings = Settings(tmp_path, nodes=0, own_network=wanted)
    if wanted:
        assert refusal(settings) == (
            f"pods can't have networks of their own: unshare: Operation not permitted; {remedy} (docs/virtual-nodes.md)"
        )
        return
    shared = started(settings).shared
    if wanted is False:
        assert shared is None and not asked, "it is what was asked for"
        return
    assert shared is not None and shared.text() == (
        "Pods share the network of this machine (unshare: Operation not permitted), so jobs that listen on the same "
        f"port run one after the other; for networks of their own {remedy} (docs/virtual-nodes.md)."
    )


def test_clusters_that_are_not_for_a_network_of_their_own() -> None:
    assert choice.unfit(None, nodes=255, clusterd=True) is None
    for wanted in (None, True):
        assert choice.unfit(wanted, nodes=256, clusterd=True) == choice.Shared(
            "256 nodes don't fit into one of their own", "start at most 255 nodes"
        )
    beside = choice.unfit(None, nodes=2, clusterd=False)
    assert beside is not None and "ClusterD" in beside.reason
    assert choice.unfit(True, nodes=2, clusterd=False) is None, "whoever asks for it knows why"
