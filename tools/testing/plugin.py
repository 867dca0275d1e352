"""A plugin of pytest (`-p tools.testing.plugin --record FILE`): how each test ended, one JSON object a line.

Written as it happens, so that what a run that was killed had found is there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write how each test ended to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file is not None and not hasattr(config, "workerinput"):  # xdist's workers report to the main process
        config.pluginmanager.register(_Recorder(file))


class _Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file.open("w", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed(report)
        elif report.when == "call" or report.skipped:
            self._write(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed(report)

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _failed(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        self._write(
            report.nodeid,
            "failed",
            place=f"{crash.path}:{crash.lineno}" if crash else "",
            message=crash.message if crash else report.longreprtext,
            said="\n".join(text for _, text in report.sections),
        )

    def _write(self, test: str, outcome: str, **more: str) -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, **more}) + "\n")
