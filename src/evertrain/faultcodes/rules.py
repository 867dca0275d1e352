"""Faults of chips that come often or stay long become worse. Pure; noded asks it before it publishes a fault.

A fault that falls under both kinds of rules counts as one that came only when it has stayed for its timeout. The worst
level wins. Times are wall-clock milliseconds; where the clock is set back, what was counted in its future is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from evertrain.faultcodes.levels import MANUAL, severity, worst
from evertrain.faultcodes.table import Codes, Duration, Frequency, normal

BY_FREQUENCY, BY_DURATION = "FaultFrequency", "FaultDuration"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Why a chip is worse than its faults. A line of UpgradeFaultReason."""

    time_ms: int
    code: str
    level: str
    kind: str


class _Track(msgspec.Struct):
    """A code on a chip."""

    since: int | None = None
    """Present since then; None: it is gone."""
    gone: int = 0
    """When it went."""
    counted: bool = False
    """This presence is among `times`."""
    times: list[int] = []
    often: dict[str, int] = {}
    """Levels reached by coming often, and when. A level is what tells rules of the same code apart."""
    stayed: dict[str, int] = {}
    """Levels reached by staying, and when."""


class _State(msgspec.Struct):
    version: int = 1
    chips: dict[str, dict[str, _Track]] = {}


class Upgrades:
    def __init__(self, codes: Codes) -> None:
        self._chips: dict[str, dict[str, _Track]] = {}
        self.rules(codes)

    def rules(self, codes: Codes) -> None:
        """From now on these. What was reached stays reached, where its rule is still there."""
        self._often: dict[str, list[Frequency]] = {}
        self._stay: dict[str, list[Duration]] = {}
        for often in codes.frequency:
            for code in often.codes:
                self._often.setdefault(code, []).append(often)
        for stay in codes.duration:
            for code in stay.codes:
                self._stay.setdefault(code, []).append(stay)

    def observe(self, chip: str, present: Mapping[str, int], now_ms: int) -> tuple[Upgrade, ...]:
        """The codes that a chip has now, and since when. What makes it worse than them, worst last."""
        here = {normal(code): since for code, since in present.items()}
        tracks = self._chips.setdefault(chip, {})
        for code in here:
            if code not in tracks and (code in self._often or code in self._stay):
                tracks[code] = _Track()
        found: list[Upgrade] = []
        for code, track in list(tracks.items()):
            self._step(code, track, here.get(code), now_ms)
            found += [Upgrade(at, code, level, BY_FREQUENCY) for level, at in track.often.items()]
            found += [Upgrade(at, code, level, BY_DURATION) for level, at in track.stayed.items()]
            if track.since is None and not (track.times or track.often or track.stayed):
                del tracks[code]
        if not tracks:
            del self._chips[chip]
        return tuple(sorted(found, key=lambda each: (severity(each.level), each.time_ms, each.code)))

    def next_ms(self, now_ms: int) -> int | None:
        """When time alone changes what `observe` says of some chip."""
        whens = [when for tracks in self._chips.values() for code, track in tracks.items()
                 for when in self._whens(code, track) if when > now_ms]  # fmt: skip
        return min(whens, default=None)

    def clear(self, chip: str) -> None:
        """Somebody cleared the chip by hand: what made it worse is forgotten."""
        for track in self._chips.get(chip, {}).values():
            track.times.clear()
            track.often.clear()
            track.stayed.clear()

    def manual(self) -> tuple[str, ...]:
        """The chips that are kept away until somebody clears them. ManuallySeparateNPU of the device-info."""
        return tuple(sorted(
            chip for chip, tracks in self._chips.items() if any(MANUAL in track.often for track in tracks.values())
        ))  # fmt: skip

    def dump(self) -> bytes:
        return msgspec.json.encode(_State(chips=self._chips))

    def load(self, data: bytes) -> None:
        """What was dumped. Raises ValueError if it is something else; nothing is changed then."""
        try:
            state = msgspec.json.decode(data, type=_State)
        except (UnicodeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        if state.version != 1:
            raise ValueError(f"version {state.version} is not known")
        self._chips = state.chips

    def _step(self, code: str, track: _Track, since: int | None, now_ms: int) -> None:
        if since is not None and since > now_ms:
            since = now_ms
        if since is None and track.since is not None:
            track.since, track.gone, track.counted = None, now_ms, False
        elif since is not None and (track.since is None or since > track.since):
            # It came, or it went and came again while nobody looked.
            track.since, track.counted = since, False
        self._stays(code, track, now_ms)
        self._comes_often(code, track, now_ms)

    def _stays(self, code: str, track: _Track, now_ms: int) -> None:
        rules = {rule.level: rule for rule in self._stay.get(code, ())}
        for level, rule in rules.items():
            if track.since is not None and now_ms - track.since >= rule.timeout_s * 1000:
                track.stayed.setdefault(level, now_ms)
        if track.since is None:
            for level in list(track.stayed):
                if level not in rules or now_ms - track.gone >= rules[level].recover_s * 1000:
                    del track.stayed[level]

    def _comes_often(self, code: str, track: _Track, now_ms: int) -> None:
        rules = self._often.get(code, ())
        if not rules:
            track.times.clear()
            track.often.clear()
            return
        waits = min((rule.timeout_s for rule in self._stay.get(code, ())), default=0) * 1000
        if track.since is not None and not track.counted and now_ms - track.since >= waits:
            track.counted = True
            track.times.append(track.since)
        longest = max(rule.window_s for rule in rules) * 1000
        track.times = [then for then in track.times if now_ms - longest < then <= now_ms][-100:]
        for rule in rules:
            recent = [then for then in track.times if now_ms - rule.window_s * 1000 < then]
            if len(recent) >= rule.times:
                track.often.setdefault(rule.level, now_ms)
        releases = {rule.level: rule.release_s for rule in rules}
        if track.since is None:
            for level in list(track.often):
                release = releases.get(level)
                if level not in releases or (release is not None and now_ms - track.gone >= release * 1000):
                    del track.often[level]
                    track.times.clear()

    def _whens(self, code: str, track: _Track) -> list[int]:
        whens = []
        for stay in self._stay.get(code, ()):
            if track.since is not None:
                whens.append(track.since + stay.timeout_s * 1000)
            elif stay.level in track.stayed:
                whens.append(track.gone + stay.recover_s * 1000)
        for often in self._often.get(code, ()):
            if track.since is None and often.level in track.often and often.release_s is not None:
                whens.append(track.gone + often.release_s * 1000)
        return whens


def worst_with(level: str, upgrades: tuple[Upgrade, ...]) -> str:
    """The level of a chip that has `level` by its faults."""
    return worst([level, *(upgrade.level for upgrade in upgrades)])
