"""`evertrain COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from evertrain import __version__

_HELP = """\
usage: evertrain COMMAND ...

Keeps distributed training running through faults.

commands:
  launch      start a training script on this machine and keep it running (takes torchrun's options)
  ctl         pause a running job, let it continue, exchange a process, ask for its status
  timeline    show what happened in a run, from its events file
  demo        train, kill a process in the middle, and compare the results
  controller  run a job's controller by itself, for agents that connect over the network
  version     print the version

`evertrain COMMAND --help` explains a command.
"""


def _launch(argv: Sequence[str]) -> int:
    from evertrain.launch.launcher import main

    return main(argv)


def _ctl(argv: Sequence[str]) -> int:
    from evertrain.cli.ctl import main

    return main(argv)


def _timeline(argv: Sequence[str]) -> int:
    from evertrain.cli.timeline import main

    return main(argv)


def _controller(argv: Sequence[str]) -> int:
    from evertrain.cli.controller import main

    return main(argv)


def _demo(argv: Sequence[str]) -> int:
    from evertrain.cli.demo import main

    return main(argv)


def _version(argv: Sequence[str]) -> int:
    print(f"evertrain {__version__}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "launch": _launch,
    "ctl": _ctl,
    "timeline": _timeline,
    "demo": _demo,
    "controller": _controller,
    "version": _version,
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_HELP, end="", file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if name in ("-V", "--version"):
        name = "version"
    command = COMMANDS.get(name)
    if command is None:
        print(f"evertrain: there is no command {name!r}; commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return command(rest)


if __name__ == "__main__":
    sys.exit(main())
