"""`evertrain clusterd`: ClusterD in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from evertrain.cli import running


def main(argv: Sequence[str]) -> int:
    if missing := running.missing_packages():
        return running.complain("clusterd", missing, running.USAGE)
    from evertrain.clusterd.__main__ import main as run

    return run(list(argv))
