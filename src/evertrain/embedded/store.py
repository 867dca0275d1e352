"""The objects of the embedded cluster: in memory for reading, in SQLite to outlive the process.

One counter numbers all changes; it is the resourceVersion. All of it runs in one thread without a wait in between, so a
read, a decision and a write that follow each other are one transaction; the version that a writer expects is
checked nevertheless, for it may have been read long before.

An object is kept as the bytes that go over the wire. Reading them again is the cheapest copy there is, lists and
watches send them as they are, and what is only kept for history costs no more than its text.
"""

from __future__ import annotations

import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from evertrain.kube.port import Object

HISTORY_CHANGES = 10_000
HISTORY_BYTES = 16 << 20
"""Of one kind. A watch that was cut goes on without a new list if it missed less than that."""

ADDED, MODIFIED, DELETED = "ADDED", "MODIFIED", "DELETED"

_encode = msgspec.json.Encoder().encode
_decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode
_skim: Callable[[bytes], Any] = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Sees whether it is an object, without making one."""

Key = tuple[str, str]
"""Namespace (empty for what has none) and name."""


class Exists(Exception):
    """There is an object of that name."""


class Changed(Exception):
    """The object has another version than the writer expected, or is gone."""


class TooOld(Exception):
    """History does not reach back to that version."""


class NotStored(Exception):
    """The disk is full, broken or gone. Nothing has changed."""


def _check(resource: str, namespace: str, name: str, data: Any) -> None:
    """Better not to start than to fail at every list of the kind. Raises sqlite3.DatabaseError."""
    try:
        _skim(data)
    except (msgspec.DecodeError, TypeError):
        raise sqlite3.DatabaseError(f"{resource} {namespace}/{name} is damaged") from None


class Record:
    """One version of an object."""

    __slots__ = ("_object", "data", "name", "namespace", "version")

    def __init__(self, namespace: str, name: str, version: int, data: bytes) -> None:
        self.namespace = namespace
        self.name = name
        self.version = version
        self.data = data
        self._object: Object | None = None

    @property
    def object(self) -> Object:
        """Shared by all readers: to be read only."""
        if self._object is None:
            self._object = _decode(self.data)
        return self._object

    def copy(self) -> Object:
        """The reader's own."""
        result: Object = _decode(self.data)
        return result

    def forget(self) -> None:
        self._object = None


@dataclass(frozen=True, slots=True)
class StoredChange:
    type: str
    version: int
    record: Record
    """The object after the change; of a deletion its last state, with the version of the deletion."""
    previous: Record | None


@dataclass(slots=True)
class _Shelf:
    """The objects of one kind and what happened to them lately."""

    records: dict[Key, Record] = field(default_factory=dict)
    history: deque[StoredChange] = field(default_factory=deque)
    history_bytes: int = 0
    floor: int = 0
    """Changes up to this version are not in the history."""
    order: list[Key] | None = None
    listeners: dict[object, Callable[[StoredChange], None]] = field(default_factory=dict)


class Store:
    def __init__(
        self,
        path: Path | None = None,
        *,
        history_changes: int = HISTORY_CHANGES,
        history_bytes: int = HISTORY_BYTES,
        first_version: int = 1,
    ) -> None:
        """Without a path nothing outlives the process."""
        self._history_changes = history_changes
        self._history_bytes = history_bytes
        if path is not None:
            # Secrets are in it, and the directory may be one that others can look into.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        # A second process on the same file would number its changes with the same versions.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        # Moving the log into the file waits for the disk; better seldom than every few hundred changes.
        self._db.execute("PRAGMA wal_autocheckpoint=8000")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS objects (resource TEXT, namespace TEXT, name TEXT, version INTEGER, data BLOB,"
            " PRIMARY KEY (resource, namespace, name)) WITHOUT ROWID"
        )
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS counter (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER)"
        )
        self._db.execute("INSERT OR IGNORE INTO counter VALUES (1, ?)", (first_version,))
        self._shelves: dict[str, _Shelf] = {}
        (self.version,) = self._db.execute("SELECT version FROM counter").fetchone()
        """Of the latest change."""
        self._start = self.version
        rows = self._db.execute("SELECT resource, namespace, name, version, data FROM objects")
        for resource, namespace, name, version, data in rows:
            _check(resource, namespace, name, data)
            self._shelf(resource).records[namespace, name] = Record(namespace, name, version, data)

    def close(self) -> None:
        self._db.close()

    def _shelf(self, resource: str) -> _Shelf:
        shelf = self._shelves.get(resource)
        if shelf is None:
            shelf = self._shelves[resource] = _Shelf(floor=self._start)
        return shelf

    def get(self, resource: str, namespace: str, name: str) -> Record | None:
        return self._shelf(resource).records.get((namespace, name))

    def records(self, resource: str, namespace: str | None = None) -> list[Record]:
        """In the order of namespace and name."""
        shelf = self._shelf(resource)
        if shelf.order is None:
            shelf.order = sorted(shelf.records)
        if namespace is None:
            return [shelf.records[key] for key in shelf.order]
        return [shelf.records[key] for key in shelf.order if key[0] == namespace]

    def records_at(self, resource: str, version: int, namespace: str | None = None) -> list[Record]:
        """As it was at that version. Raises TooOld."""
        if version >= self.version:
            return self.records(resource, namespace)
        state = {(record.namespace, record.name): record for record in self.records(resource)}
        for change in reversed(list(self.since(resource, version))):
            key = change.record.namespace, change.record.name
            if change.previous is None:
                state.pop(key, None)
            else:
                state[key] = change.previous
        return [state[key] for key in sorted(state) if namespace is None or key[0] == namespace]

    def resources_in(self, namespace: str) -> list[str]:
        """Kinds that have objects in that namespace."""
        return [name for name, shelf in self._shelves.items() if any(key[0] == namespace for key in shelf.records)]

    def count(self, resource: str) -> int:
        return len(self._shelf(resource).records)

    # Writing

    def create(self, resource: str, namespace: str, name: str, item: Object) -> Record:
        """Raises Exists. The version is written into the object's metadata."""
        shelf = self._shelf(resource)
        if (namespace, name) in shelf.records:
            raise Exists
        return self._put(resource, shelf, namespace, name, item, None)

    def update(self, resource: str, namespace: str, name: str, item: Object, expected: int | None = None) -> Record:
        """Raises Changed."""
        shelf = self._shelf(resource)
        previous = shelf.records.get((namespace, name))
        if previous is None or (expected is not None and previous.version != expected):
            raise Changed
        return self._put(resource, shelf, namespace, name, item, previous)

    def delete(self, resource: str, namespace: str, name: str, expected: int | None = None) -> Record:
        """Returns the last state, with the version of the deletion. Raises Changed."""
        shelf = self._shelf(resource)
        previous = shelf.records.get((namespace, name))
        if previous is None or (expected is not None and previous.version != expected):
            raise Changed
        version = self.version + 1
        last = previous.copy()
        last["metadata"]["resourceVersion"] = str(version)
        record = Record(namespace, name, version, _encode(last))
        self._write(
            version,
            "DELETE FROM objects WHERE resource = ? AND namespace = ? AND name = ?",
            (resource, namespace, name),
        )
        del shelf.records[namespace, name]
        shelf.order = None
        self._publish(shelf, StoredChange(DELETED, version, record, previous))
        return record

    def _put(
        self, resource: str, shelf: _Shelf, namespace: str, name: str, item: Object, previous: Record | None
    ) -> Record:
        version = self.version + 1
        item["metadata"]["resourceVersion"] = str(version)
        record = Record(namespace, name, version, _encode(item))
        self._write(
            version,
            "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?)",
            (resource, namespace, name, version, record.data),
        )
        shelf.records[namespace, name] = record
        if previous is None:
            shelf.order = None
        self._publish(shelf, StoredChange(ADDED if previous is None else MODIFIED, version, record, previous))
        return record

    def _write(self, version: int, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._db.execute("BEGIN")
            self._db.execute(statement, values)
            self._db.execute("UPDATE counter SET version = ?", (version,))
            self._db.execute("COMMIT")
        except BaseException as error:
            # Of a disk that is full SQLite has drawn the consequence itself.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise NotStored(f"the change can't be stored: {error}") from error
            raise
        self.version = version

    # Watching

    def since(self, resource: str, version: int) -> Iterator[StoredChange]:
        """Changes after that version. Raises TooOld."""
        shelf = self._shelf(resource)
        if version < shelf.floor:
            raise TooOld
        newer: list[StoredChange] = []
        for change in reversed(shelf.history):
            if change.version <= version:
                break
            newer.append(change)
        return reversed(newer)

    def listen(self, resource: str, owner: object, listener: Callable[[StoredChange], None]) -> None:
        """Calls the listener with every change, in the middle of the write: it must be short and must not fail."""
        self._shelf(resource).listeners[owner] = listener

    def unlisten(self, resource: str, owner: object) -> None:
        self._shelf(resource).listeners.pop(owner, None)

    def _publish(self, shelf: _Shelf, change: StoredChange) -> None:
        shelf.history.append(change)
        shelf.history_bytes += len(change.record.data)
        while len(shelf.history) > self._history_changes or (
            shelf.history_bytes > self._history_bytes and len(shelf.history) > 1
        ):
            oldest = shelf.history.popleft()
            shelf.history_bytes -= len(oldest.record.data)
            shelf.floor = oldest.version
        for listener in list(shelf.listeners.values()):
            listener(change)
        if change.previous is not None:
            change.previous.forget()
        if change.type == DELETED:
            change.record.forget()
