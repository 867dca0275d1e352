"""`evertrain controller`: the controller of a job in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    from evertrain.mindio.controller.__main__ import main as run

    return run(list(argv))
