"""The incidents in a file of SQLite, also those of jobs that are gone. Knows no loop and no thread.

The file is a record and not a state: ClusterD does without it. So a damaged file is put aside and a new one begun, and
the oldest incidents make room for new ones.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from evertrain.clusterd.timeline.incident import Incident

VERSION = 1
KEEP = 10_000
KEEP_MS = 90 * 24 * 3600 * 1000
DAMAGED = ".damaged"
BUSY_SECONDS = 5.0

_MIGRATIONS = (
    (
        "CREATE TABLE incidents (job TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, namespace TEXT NOT NULL,"
        " opened INTEGER NOT NULL, updated INTEGER NOT NULL, closed INTEGER NOT NULL, data BLOB NOT NULL,"
        " PRIMARY KEY (job, id))",
        "CREATE INDEX incidents_by_time ON incidents (updated)",
        "CREATE INDEX incidents_by_name ON incidents (name, opened)",
    ),
)
"""What leads from each version of the file to the next."""

_decoder = msgspec.json.Decoder(Incident)


class Damaged(Exception):
    """The file is no database of incidents, or not one that this version can read."""


class Store:
    """Methods raise Damaged, or sqlite3.Error and OSError for what may pass: a full disk, a file that is locked."""

    def __init__(self, path: Path, *, keep: int = KEEP, keep_ms: int = KEEP_MS, read_only: bool = False) -> None:
        self._keep = keep
        self._keep_ms = keep_ms
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Names of nodes and jobs are in it, and the directory may be one that others can look into.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = _connect(path, read_only)
        try:
            with _damage():
                self._prepare(read_only)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def _prepare(self, read_only: bool) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise Damaged(f"it was written by a newer version ({version}, this one knows {VERSION})")
        if version:
            self._db.execute("SELECT id FROM incidents LIMIT 1")
        if read_only:
            if version < VERSION:
                raise Damaged("it is no timeline of ClusterD's")
            return
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise Damaged(str(verdict))
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        for number, statements in enumerate(_MIGRATIONS[version:], version + 1):
            with self._transaction():
                for statement in statements:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={number}")

    def save(self, incidents: Iterable[Incident]) -> None:
        """The newest versions of these."""
        self._insert("REPLACE", incidents)

    def add(self, incidents: Iterable[Incident]) -> None:
        """Those of them that are not there in any version."""
        self._insert("IGNORE", incidents)

    def _insert(self, conflict: str, incidents: Iterable[Incident]) -> None:
        rows = [
            (
                each.job,
                each.id,
                each.name,
                each.namespace,
                each.opened_ms,
                each.updated_ms,
                each.closed,
                msgspec.json.encode(each),
            )
            for each in incidents
        ]
        with _damage(), self._transaction():
            self._db.executemany(f"INSERT OR {conflict} INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def prune(self, now_ms: int) -> int:
        """Removes what is too old and what is too much, the oldest first. How many those were."""
        with _damage(), self._transaction():
            aged = self._db.execute("DELETE FROM incidents WHERE updated < ?", (now_ms - self._keep_ms,)).rowcount
            (count,) = self._db.execute("SELECT count(*) FROM incidents").fetchone()
            excess = max(0, count - self._keep)
            self._db.execute(
                "DELETE FROM incidents WHERE rowid IN (SELECT rowid FROM incidents ORDER BY updated LIMIT ?)", (excess,)
            )
        return max(0, aged) + int(excess)

    def open_incidents(self) -> list[Incident]:
        return self._read("SELECT data FROM incidents WHERE NOT closed ORDER BY opened", ())

    def incidents(self, job: str = "", namespace: str = "", newest: int = -1) -> list[Incident]:
        """Oldest first: all, or those of a job by its name or uid; only the newest so many."""
        return self._read(
            "SELECT data FROM (SELECT data, opened, id FROM incidents"
            " WHERE (:job = '' OR name = :job OR job = :job) AND (:namespace = '' OR namespace = :namespace)"
            " ORDER BY opened DESC, id DESC LIMIT :newest) ORDER BY opened, id",
            {"job": job, "namespace": namespace, "newest": newest},
        )

    def _read(self, query: str, values: tuple[object, ...] | dict[str, object]) -> list[Incident]:
        with _damage():
            rows = self._db.execute(query, values).fetchall()
        found = []
        for (data,) in rows:
            with contextlib.suppress(msgspec.MsgspecError, TypeError, RecursionError):  # the others are worth showing
                found.append(_decoder.decode(data))
        return found

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled it back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def put_aside(path: Path) -> Path:
    """Makes room for a new file; an earlier damaged one is replaced, so that they don't become many."""
    aside = path.with_name(path.name + DAMAGED)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(path.with_name(path.name + suffix), aside.with_name(aside.name + suffix))
    os.replace(path, aside)
    return aside


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    if not read_only:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    address = f"{path.absolute().as_uri()}?mode=ro"
    database = sqlite3.connect(address, uri=True, isolation_level=None, timeout=BUSY_SECONDS)
    try:
        database.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        # A file in a folder that can't be written to, a copy from a backup for example, has no shared memory beside it.
        database.close()
        database = sqlite3.connect(f"{address}&immutable=1", uri=True, isolation_level=None)
    except sqlite3.DatabaseError:
        pass  # not a database: told by who reads from it
    return database


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """What won't pass by itself. Full disks and locks are OperationalErrors; so is a table that is not there."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "no such" in str(error) or "malformed" in str(error):
            raise Damaged(str(error)) from None
        raise
    except sqlite3.DatabaseError as error:
        raise Damaged(str(error)) from None
