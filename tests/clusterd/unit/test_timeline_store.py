"""The incidents on the disk: bounds, restarts, damaged files, full disks."""

import logging
import os
import sqlite3
import stat
import threading

import pytest

from evertrain.clusterd.timeline.incident import Incident, Phase
from evertrain.clusterd.timeline.store import VERSION, Damaged, Store
from evertrain.clusterd.timeline.writer import Writer


def incident(number, job="u-1", name="bert", namespace="team", at=None, closed=True):
    at = number * 1000 if at is None else at
    return Incident(f"I{number}-x", job, name, namespace, at, at + 5, phases=(Phase("detect", at),), closed=closed)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kept" / "timeline.db"


@pytest.fixture
def writer(path):
    made = []

    def make(**options):
        made.append(Writer(path, wall_clock=lambda: 100.0, retry_seconds=0.01, **options))
        return made[-1], made[-1].start()

    yield make
    for each in made:
        each.close()


def read(path, *arguments, **options):
    store = Store(path, read_only=True)
    try:
        return store.incidents(*arguments, **options)
    finally:
        store.close()


def test_incidents_come_back_as_they_were_and_by_job(path):
    store = Store(path)
    first, second, other = incident(1), incident(2), incident(3, "u-2", "gpt", "default")
    store.save([second, first, other])
    assert store.incidents() == [first, second, other]
    assert store.incidents("bert") == store.incidents("u-1") == [first, second]
    assert store.incidents("bert", "default") == [] and store.incidents("gpt", "default") == [other]
    assert store.incidents(newest=1) == [other]
    store.close()
    assert read(path) == [first, second, other]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_newer_version_of_an_incident_replaces_the_older(path):
    store = Store(path)
    store.save([incident(1, closed=False)])
    assert store.open_incidents() == [incident(1, closed=False)]
    store.save([incident(1)])
    assert store.incidents() == [incident(1)] and store.open_incidents() == []
    store.close()


def test_what_is_known_from_elsewhere_is_added_and_replaces_nothing(path, writer):
    kept, found = writer(open_store=Store)
    kept.put([incident(1), incident(2, closed=False)])
    kept.close()
    again = Writer(path)
    elsewhere = [incident(1, closed=False), incident(2), incident(3)]
    assert again.start(elsewhere) == [incident(2, closed=False)] and found == []
    again.close()
    assert read(path) == [incident(1), incident(2, closed=False), incident(3)]


def test_it_is_bounded_by_number_and_by_age(path):
    store = Store(path, keep=5, keep_ms=7_500)
    store.save(incident(number) for number in range(10))
    assert store.prune(now_ms=10_000) == 5  # three are too old, two of the others too many
    assert [each.id for each in store.incidents()] == [f"I{number}-x" for number in range(5, 10)]
    assert store.prune(now_ms=10_000) == 0
    assert store.prune(now_ms=10**9) == 5
    store.close()


def test_the_writer_prunes_by_itself(path, writer):
    kept, _ = writer(open_store=lambda where: Store(where, keep=50))
    for number in range(500):
        kept.put([incident(number, at=100_000 + number)])
    kept.flush(20)
    kept.put([incident(number, at=200_000 + number) for number in range(500, 700)])
    assert kept.flush(20)
    assert len(read(path)) == 50


def test_who_reads_does_not_disturb_who_writes(path, writer):
    kept, _ = writer()
    kept.put([incident(1)])
    assert kept.flush(20)
    store = Store(path, read_only=True)
    assert store.incidents() == [incident(1)]
    kept.put([incident(2)])
    assert kept.flush(20) and store.incidents() == [incident(1), incident(2)]
    with pytest.raises(sqlite3.OperationalError):
        store.save([incident(3)])
    store.close()


def test_open_incidents_are_there_after_a_restart(path, writer):
    kept, found = writer()
    assert found == []
    kept.put([incident(1), incident(2, closed=False)])
    kept.close()
    _, found = writer()
    assert found == [incident(2, closed=False)]


@pytest.mark.parametrize("damage", ["text", "torn", "newer", "another", "empty"])
def test_a_damaged_file_is_put_aside_and_told(path, writer, caplog, damage):
    path.parent.mkdir()
    if damage == "text":
        path.write_text("not a database, but long enough to look at" * 100)
    elif damage == "torn":
        store = Store(path)
        store.save(incident(number) for number in range(2000))
        store.close()
        data = bytearray(path.read_bytes())
        data[4096 : len(data) // 2] = os.urandom(len(data) // 2 - 4096)
        path.write_bytes(data)
    elif damage == "newer":
        database = sqlite3.connect(path)
        database.execute(f"PRAGMA user_version={VERSION + 1}")
        database.close()
    elif damage == "another":
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE other (a)")
        database.execute(f"PRAGMA user_version={VERSION}")
        database.close()
    else:
        path.touch()
    before = path.read_bytes()
    kept, found = writer()
    assert found == []
    kept.put([incident(1)])
    assert kept.flush(20)
    assert read(path) == [incident(1)]
    aside = path.with_name("timeline.db.damaged")
    if damage == "empty":
        assert not aside.exists() and not caplog.records
    else:
        assert aside.read_bytes() == before
        (line,) = [each.getMessage() for each in caplog.records]
        assert str(path) in line and str(aside) in line and "damaged" in line


def test_damage_while_it_is_written_is_put_aside_too(path, writer, caplog):
    kept, _ = writer()
    kept.put([incident(1)])
    assert kept.flush(20)
    other = sqlite3.connect(path)
    other.execute("DROP TABLE incidents")
    other.close()
    kept.put([incident(2)])
    assert kept.flush(20)
    assert read(path) == [incident(2)]
    assert len([each for each in caplog.records if "moved to" in each.getMessage()]) == 1


def test_reading_what_is_no_timeline_says_so(tmp_path):
    (tmp_path / "text").write_text("hello" * 1000)
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE a (b)").connection.close()
    for name in ("text", "other"):
        with pytest.raises(Damaged):
            read(tmp_path / name)


class Full(Store):
    """A disk that is full until it is told otherwise, as SQLite says it."""

    full = threading.Event()
    tries = 0

    def save(self, incidents):
        if Full.full.is_set():
            Full.tries += 1
            raise sqlite3.OperationalError("database or disk is full")
        super().save(incidents)


def test_a_full_disk_is_told_once_and_nothing_is_lost_when_there_is_room_again(path, writer, caplog):
    caplog.set_level(logging.INFO)
    Full.full.set()
    kept, _ = writer(open_store=Full)
    before = Full.tries
    kept.put([incident(1, closed=False)])
    while Full.tries < before + 3:
        kept.put([incident(2)])
        kept.put([incident(1)])
        threading.Event().wait(0.005)
    assert len(caplog.records) == 1 and "disk is full" in caplog.records[0].getMessage()
    Full.full.clear()
    while len(caplog.records) < 2:
        threading.Event().wait(0.005)
    assert kept.flush(20)
    assert sorted(each.id for each in read(path)) == ["I1-x", "I2-x"] and all(each.closed for each in read(path))
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_a_really_full_disk_is_told_too(path, writer, caplog):
    """SQLite itself says it, at a size that it must not pass."""

    def small(where):
        store = Store(where)
        store._db.execute("PRAGMA max_page_count=12")
        return store

    kept, _ = writer(open_store=small)
    kept.put(incident(number, name="n" * 200) for number in range(2000))
    kept.flush(20)
    kept.close()
    assert len(caplog.records) == 1 and "full" in caplog.records[0].getMessage()


def test_a_folder_that_cannot_be_made_is_told_and_nothing_else_happens(tmp_path, caplog):
    (tmp_path / "file").touch()
    kept = Writer(tmp_path / "file" / "timeline.db", retry_seconds=0.01)
    assert kept.start() == []
    kept.put([incident(1)])
    kept.close()
    assert len(caplog.records) == 1 and str(tmp_path / "file") in caplog.records[0].getMessage()
