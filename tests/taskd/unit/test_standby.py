"""A torchrun that waits for its place: the file as a kubelet writes it, all at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.taskd.agent import standby

COMMAND = ("./train", "--lr", "1")
"""None that a spare could become: nothing is started."""


class Volume:
    """As a kubelet has it: `..data` leads to the files of one moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moments = 0
        self.write("")
        os.symlink("..data/rank", folder / "rank")

    def write(self, rank: str) -> None:
        self.moments += 1
        moment = self.folder / f"..{self.moments}"
        moment.mkdir()
        (moment / "rank").write_text(rank)
        os.symlink(moment.name, self.folder / "..next")
        os.replace(self.folder / "..next", self.folder / "..data")


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    monkeypatch.setenv("TASKD_PLACE_FILE", str(tmp_path / "rank"))
    yield Volume(tmp_path)
    if (reserve := standby.inherited()) is not None:
        reserve.spares.close()
        reserve.selector.close()
        reserve.guardian.close()


def test_a_pod_with_a_place_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKD_PLACE_FILE", raising=False)
    assert standby.stand_by(COMMAND, 2) == ""
    assert standby.inherited() is None


def test_a_place_that_came_before_torchrun_is_taken_at_once(volume: Volume) -> None:
    volume.write("3")
    assert standby.stand_by(COMMAND, 2) == "3"
    assert standby.inherited() is None, "there was no time to get warm"


def test_it_waits_for_its_place_and_hands_its_reserve_on(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = threading.Event()
    watch = standby._watch

    def watched(folder: str) -> int | None:
        found = watch(folder)
        watching.set()
        return found

    monkeypatch.setattr(standby, "_watch", watched)
    monkeypatch.setattr(standby, "LOOK", 3600.0)
    ranks: list[str] = []
    waiting = threading.Thread(target=lambda: ranks.append(standby.stand_by(COMMAND, 2)), daemon=True)
    waiting.start()
    assert watching.wait(60)
    volume.write("")
    volume.write("nonsense")
    assert not ranks
    volume.write("1")
    waiting.join(60)
    assert ranks == ["1"]
    reserve = standby.inherited()
    assert reserve is not None and standby.inherited() is None, "once"
    reserve.selector.close()
    reserve.guardian.close()


def test_where_changes_are_not_announced_it_looks_now_and_then(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_watch", lambda folder: None)
    monkeypatch.setattr(standby, "LOOK", 0.01)
    ranks: list[str] = []
    waiting = threading.Thread(target=lambda: ranks.append(standby.stand_by(COMMAND, 2)), daemon=True)
    waiting.start()
    volume.write("2")
    waiting.join(60)
    assert ranks == ["2"]
