"""What is said at the end of a run of tests: pure text, 60 lines at most when it is red.

Often only the end of a log is shown. It therefore has all that one needs to begin with: the tests, each with its
assertion, the last lines of the job that it ran, and the command that runs it again.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

LINES = 60
WIDTH = 200
PART = re.compile(r"(?:[\w.]+: )?\s*--- (.+)")
OWN = re.compile(r"pod ?\d|std|log of |timeline")
"""Parts of a message that are the output of a job, or tell of its recovery."""
TOLERATED = 3
"""So many tests may fail at first and pass at the second look. More, and something is wrong with the machine or us."""


@dataclass(frozen=True)
class Failure:
    test: str
    place: str = ""
    message: str = ""
    said: str = ""
    """What pytest captured of the test's output."""


@dataclass
class Outcome:
    """A suite's run, second looks included."""

    suite: str
    command: str
    """What runs tests of this suite again, with their names behind it."""
    passed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failed: list[Failure] = field(default_factory=list)
    """Failed, and failed again."""
    second: list[Failure] = field(default_factory=list)
    """Failed at first; passed when run once more, alone."""
    unseen: list[Failure] = field(default_factory=list)
    """Failed; too many for a second look at each."""
    broken: str = ""
    """Why the run says nothing about its tests, if it doesn't."""

    @property
    def green(self) -> bool:
        return not (self.failed or self.unseen or self.broken) and len(self.second) <= TOLERATED


def told(outcome: Outcome) -> list[str]:
    """The end of the log."""
    red = [*outcome.failed, *outcome.unseen]
    lines = [
        f"== {outcome.suite}: {'passed' if outcome.green else 'FAILED'}. {outcome.passed} passed, {len(red)} failed, "
        f"{len(outcome.second)} second looks, {outcome.skipped} skipped, {outcome.seconds / 60:.1f} min"
    ]
    if outcome.broken:
        lines.append(f"   {outcome.broken}")
    second = [line for failure in outcome.second for line in _listed(failure)]
    if second:
        lines.append(
            "   Failed at first, passed when run once more, alone. To be mended, the test or the product:"
            if len(outcome.second) <= TOLERATED
            else f"   Failed at first, passed when run once more, alone; more than {TOLERATED} of these are a failure:"
        )
        lines += second[: LINES // 2] + ([f"     and {len(second) // 2} more"] if len(second) > LINES // 2 else [])
    room = LINES - len(lines) - 1
    shown = red[: max(1, room // 5)]
    for failure in shown:
        lines += _explained(failure, room // len(shown), outcome.command)
    if rest := red[len(shown) :]:
        lines.append(f"   and {len(rest)} more: {', '.join(failure.test for failure in rest)}"[:WIDTH])
    return lines


def _listed(failure: Failure) -> list[str]:
    return [f"     {failure.test}"[:WIDTH], f"       {_first_line(failure.message)}"[:WIDTH]]


def _explained(failure: Failure, room: int, command: str) -> list[str]:
    """In so many lines: the name, the assertion, what was said last, how to see it again."""
    assertion = [line for line in _assertion(failure.message) if line.strip()][: max(1, room // 3)]
    last = _last_words(failure, max(0, room - 2 - len(assertion)))
    return [
        f"FAILED {failure.test}"[:WIDTH],
        *(f"     {line}"[:WIDTH] for line in assertion),
        *(f"     | {line}"[:WIDTH] for line in last),
        f"     {failure.place}: {command} ARGS={shlex.quote(shlex.quote(failure.test))}"[: 2 * WIDTH],
    ]


def _first_line(message: str) -> str:
    return next(iter(_assertion(message)), "")


def _assertion(message: str) -> list[str]:
    return _taken_apart(message)[0]


def _taken_apart(message: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The first words of a message and what was compared; and by its name each part that the test added about its job.

    pytest indents what a test says, but neither its first line, nor what it has compared, nor notes.
    """
    assertion: list[str] = []
    parts: list[tuple[str, list[str]]] = []
    into = assertion
    for line in message.splitlines():
        if head := PART.match(line):
            into = []
            parts.append((head[1], into))
            continue
        if line.startswith("assert "):
            into = assertion
        into.append(line)
    return assertion, parts


def _last_words(failure: Failure, room: int) -> list[str]:
    """The end of each part that the message has about the job, first of all of what the job itself has said; what was
    captured if it has none."""
    _, parts = _taken_apart(failure.message)
    if not parts:
        return [line for line in failure.said.splitlines() if line.strip()][-12:][-room:] if room else []
    own = [each for each in parts if OWN.match(each[0])] or parts
    shares = [room // len(own) + (number < room % len(own)) for number in range(len(own))]
    found = []
    for (name, lines), share in zip(own, shares, strict=True):
        found += [f"{name}: {line.strip()}" for line in lines if line.strip()][-min(share, 12) :] if share else []
    return found


def table(suites: list[tuple[str, dict[str, Any] | None, int, float]]) -> list[str]:
    """All suites: name, how its tests ended if that is known, exit code, seconds."""
    rows = [("suite", "result", "passed", "failed", "second looks", "minutes")]
    for name, known, code, seconds in suites:
        counts = ("", "", "")
        if known:
            failed = sum(len(known.get(kind, ())) for kind in ("failed", "unseen", "failures"))
            counts = (str(known["passed"]), str(failed), str(len(known.get("second", ()))))
        rows.append((name, "passed" if code == 0 else f"FAILED ({code})", *counts, f"{seconds / 60:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
