from __future__ import annotations

import resource
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from evertrain.embedded.store import ADDED, DELETED, MODIFIED, Changed, Exists, NotStored, Store, StoredChange, TooOld


def item(value: int = 0, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a", **metadata}, "value": value}


@pytest.fixture
def store() -> Store:
    return Store()


def test_every_change_has_the_next_version(store: Store) -> None:
    first = store.create("/things", "ns", "a", item())
    second = store.create("/others", "", "b", item())
    third = store.update("/things", "ns", "a", item(1))
    gone = store.delete("/things", "ns", "a")
    assert [first.version, second.version, third.version, gone.version] == [2, 3, 4, 5]
    assert store.version == 5
    assert third.object["metadata"]["resourceVersion"] == "4"
    assert gone.object["metadata"]["resourceVersion"] == "5" and gone.object["value"] == 1


def test_a_name_is_taken_once(store: Store) -> None:
    store.create("/things", "ns", "a", item())
    with pytest.raises(Exists):
        store.create("/things", "ns", "a", item())
    store.create("/things", "other", "a", item())


def test_a_writer_that_expects_another_version_is_refused(store: Store) -> None:
    made = store.create("/things", "ns", "a", item())
    store.update("/things", "ns", "a", item(1), made.version)
    with pytest.raises(Changed):
        store.update("/things", "ns", "a", item(2), made.version)
    with pytest.raises(Changed):
        store.delete("/things", "ns", "a", made.version)
    with pytest.raises(Changed):
        store.update("/things", "ns", "none", item(2))
    found = store.get("/things", "ns", "a")
    assert found is not None and found.object["value"] == 1


def test_a_copy_is_the_readers_own(store: Store) -> None:
    record = store.create("/things", "ns", "a", item())
    record.copy()["value"] = 9
    assert record.object["value"] == 0


def test_objects_and_the_counter_outlive_the_process(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.create("/things", "ns", "a", item(5))
    store.create("/things", "ns", "b", item(6))
    store.delete("/things", "ns", "b")
    version = store.version
    store.close()
    again = Store(tmp_path / "db")
    assert again.version == version
    assert [(record.name, record.object["value"]) for record in again.records("/things")] == [("a", 5)]
    assert again.create("/things", "ns", "c", item()).version == version + 1
    again.close()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"metadata": {"name": "a', b'{"metadata": \x00\xff}', None])
def test_a_damaged_object_is_told_by_name(tmp_path: Path, damage: bytes | None) -> None:
    store = Store(tmp_path / "db")
    store.create("/things", "ns", "a", item(5))
    store.close()
    file = sqlite3.connect(tmp_path / "db")
    file.execute("UPDATE objects SET data = ?", (damage,))
    file.commit()
    file.close()
    with pytest.raises(sqlite3.DatabaseError, match="/things ns/a is damaged"):
        Store(tmp_path / "db")


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.create("/secrets", "ns", "a", item())
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        "db": "0o600",
        "db-wal": "0o600",
    }
    store.close()


def test_a_file_belongs_to_one_process(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.create("/things", "ns", "a", item())
    with pytest.raises(sqlite3.OperationalError):
        other = sqlite3.connect(tmp_path / "db", timeout=0)
        try:
            other.execute("SELECT count(*) FROM objects").fetchone()
        finally:
            other.close()
    store.close()


def test_what_the_disk_does_not_take_has_not_happened(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.create("/things", "ns", "a", item(1))
    heard: list[StoredChange] = []
    store.listen("/things", "me", heard.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "db-wal").stat().st_size, hard))
    try:
        for write in (
            lambda: store.create("/things", "ns", "b", item()),
            lambda: store.update("/things", "ns", "a", item(2)),
            lambda: store.delete("/things", "ns", "a"),
        ):
            with pytest.raises(NotStored, match="the change can't be stored: (disk I/O|database or disk is full)"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert heard == []
    assert [(record.name, record.object["value"]) for record in store.records("/things")] == [("a", 1)]
    version = store.version
    assert store.create("/things", "ns", "c", item()).version == version + 1
    store.close()
    again = Store(tmp_path / "db")
    assert [record.name for record in again.records("/things")] == ["a", "c"] and again.version == version + 1
    again.close()


def test_lists_are_in_order_and_of_one_namespace_or_all(store: Store) -> None:
    for namespace, name in (("b", "x"), ("a", "z"), ("a", "y")):
        store.create("/things", namespace, name, item())
    assert [(record.namespace, record.name) for record in store.records("/things")] == [
        ("a", "y"),
        ("a", "z"),
        ("b", "x"),
    ]
    assert [record.name for record in store.records("/things", "a")] == ["y", "z"]
    assert store.resources_in("b") == ["/things"] and store.resources_in("c") == []


def test_an_earlier_state_can_be_listed(store: Store) -> None:
    store.create("/things", "ns", "a", item(1))
    store.create("/things", "ns", "b", item(2))
    version = store.version
    store.update("/things", "ns", "a", item(10))
    store.delete("/things", "ns", "b")
    store.create("/things", "ns", "c", item(3))
    store.update("/things", "ns", "a", item(100))
    store.create("/things", "ns", "b", item(20))
    assert [(record.name, record.object["value"]) for record in store.records_at("/things", version)] == [
        ("a", 1),
        ("b", 2),
    ]
    assert [record.object["value"] for record in store.records_at("/things", store.version)] == [100, 20, 3]


def test_listeners_hear_every_change_with_what_was_before(store: Store) -> None:
    heard: list[StoredChange] = []
    store.listen("/things", "me", heard.append)
    store.create("/things", "ns", "a", item(1))
    store.update("/things", "ns", "a", item(2))
    store.create("/others", "ns", "a", item(3))
    store.delete("/things", "ns", "a")
    store.unlisten("/things", "me")
    store.create("/things", "ns", "a", item(4))
    assert [change.type for change in heard] == [ADDED, MODIFIED, DELETED]
    before = [change.previous and change.previous.object["value"] for change in heard]
    assert before == [None, 1, 2]


def test_history_tells_what_happened_since(store: Store) -> None:
    store.create("/things", "ns", "a", item(1))
    version = store.version
    store.update("/things", "ns", "a", item(2))
    store.delete("/things", "ns", "a")
    assert [(change.type, change.version) for change in store.since("/things", version)] == [
        (MODIFIED, version + 1),
        (DELETED, version + 2),
    ]
    assert list(store.since("/things", store.version)) == []


def test_history_ends_somewhere_but_for_each_kind_alone() -> None:
    store = Store(history_changes=3)
    store.create("/quiet", "ns", "a", item())
    start = store.version
    store.create("/things", "ns", "a", item())
    for value in range(10):
        store.update("/things", "ns", "a", item(value))
    with pytest.raises(TooOld):
        store.since("/things", start)
    with pytest.raises(TooOld):
        store.records_at("/things", start)
    assert len(list(store.since("/things", store.version - 3))) == 3
    assert list(store.since("/quiet", start)) == []


def test_history_is_bounded_in_bytes() -> None:
    store = Store(history_bytes=10_000)
    store.create("/things", "ns", "a", item())
    start = store.version
    for _ in range(20):
        store.update("/things", "ns", "a", {**item(), "text": "x" * 1000})
    with pytest.raises(TooOld):
        store.since("/things", start)


def test_a_new_process_knows_nothing_of_what_was_before_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.create("/things", "ns", "a", item())
    old = store.version
    store.update("/things", "ns", "a", item(1))
    latest = store.version
    store.close()
    again = Store(tmp_path / "db")
    with pytest.raises(TooOld):
        again.since("/things", old)
    assert list(again.since("/things", latest)) == []
    again.close()
