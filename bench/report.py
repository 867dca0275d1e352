"""Rows of a measurement beside their budgets; the same table for every benchmark."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


def percentile(values: list[float], share: float) -> float:
    """By nearest rank: of 10 values, the 90th percentile is the ninth."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass
class Row:
    name: str
    values: list[float]
    unit: str = "s"
    budget: float | None = None
    judged: str = "p90"
    """Which figure the budget holds for: p50, p90, p99, min or max."""
    at_least: bool = False
    notes: str = ""
    failure: str = ""
    """Why the row counts as missed whatever its figures are."""
    extra: dict[str, Any] = field(default_factory=dict)

    def figure(self, which: str) -> float:
        if which in ("min", "max"):
            return min(self.values) if which == "min" else max(self.values)
        return statistics.median(self.values) if which == "p50" else percentile(self.values, int(which[1:]) / 100)

    @property
    def held(self) -> bool | None:
        if self.failure:
            return False
        if self.budget is None:
            return None
        if not self.values:
            return False
        value = self.figure(self.judged)
        return value >= self.budget if self.at_least else value <= self.budget


def machine() -> str:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def show(title: str, rows: list[Row], file: Path | None) -> bool:
    """Print the table, write it as JSON if asked to, and tell whether all budgets were held."""
    print(f"\n{title}\n{machine()}\n")
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}   n      p50      p90      max   unit  budget")
    for row in rows:
        if row.values:
            figures = f"{row.figure('p50'):8.3f} {row.figure('p90'):8.3f} {max(row.values):8.3f}"
        else:
            figures = f"{'-':>8} {'-':>8} {'-':>8}"
        sign = ">=" if row.at_least else "<="
        verdict = "held" if row.held else "MISSED"
        budget = "" if row.budget is None else f"{sign} {row.budget:g} ({row.judged})  {verdict}"
        remarks = f"{row.failure}; {row.notes}" if row.failure else row.notes
        print(f"{row.name:{width}} {len(row.values):3} {figures}   {row.unit:5} {budget:24} {remarks}".rstrip())
    if file is not None:
        report = {"title": title, "machine": machine(), "rows": [asdict(row) | {"held": row.held} for row in rows]}
        file.write_text(json.dumps(report, indent=1) + "\n")
    return all(row.held is not False for row in rows)
