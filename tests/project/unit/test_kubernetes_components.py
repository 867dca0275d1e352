"""The cache of what a Kubernetes for tests is made of: whole, or not there; and what is said where it can't be made."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.kubernetes_cluster import cluster, components


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_cache_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    components.place().mkdir(parents=True)
    monkeypatch.setattr(components, "build", lambda folder: pytest.fail("built again"))
    assert components.get().folder == components.place()


def test_a_build_that_fails_leaves_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Apt:
        def __init__(self, folder: Path) -> None:
            folder.mkdir()

        def update(self) -> None:
            raise RuntimeError("no network")

    monkeypatch.setattr(components, "check", lambda: None)
    monkeypatch.setattr(components, "Apt", Apt)
    for _ in range(2):  # and the next one is not hindered by what is left of it
        with pytest.raises(RuntimeError, match="no network"):
            components.get()
    assert not components.place().exists()


def test_another_distribution_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "plan9", "VERSION_ID": "4"})
    with pytest.raises(components.Unsuitable, match=r"Debian 12 .*\n.*This is plan9 4(.|\n)*KUBECONFIG=... make"):
        components.get()


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 1000)
    with pytest.raises(components.Unsuitable, match="You are not root"), cluster.running():
        pass


def test_what_runs_is_not_cleaned_and_what_was_killed_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "runs", lambda: tmp_path)
    monkeypatch.setattr(cluster, "CONTROL_GROUPS", tmp_path / "none")
    folders = [tmp_path / f"{cluster.NAME}{name}" for name in ("aa", "bb")]
    for folder in folders:
        folder.mkdir()
    with cluster._lock(folders[0]):
        assert cluster.clean() == [folders[1].name]
    assert [folder.exists() for folder in folders] == [True, False]
    assert cluster.clean() == [folders[0].name]
