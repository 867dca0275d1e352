"""`evertrain COMMAND ...`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from evertrain import __version__

_HELP = """\
usage: evertrain COMMAND ...

Keeps distributed training running through faults.

training on this machine or on machines of yours:
  launch      start a training script on this machine and keep it running (takes torchrun's options)
  ctl         pause a running job, let it continue, exchange a process, ask for its status
  timeline    show what happened in a run, from its events file, or to a job on a cluster
  demo        train, kill a process in the middle, and compare the results
  controller  run a job's controller by itself, for agents that connect over the network

a cluster on this machine, for AscendJobs (pip install 'evertrain[cluster]'):
  up          start it: API server for kubectl, scheduler, operator, nodes whose pods are processes
  down        end it
  run         run a job from its YAML file to its end, on a cluster made for it if none runs
  get         list objects, or show one (like kubectl, as the next three)
  describe    show an object with its events
  logs        print what a pod wrote
  delete      delete objects
  node        stop and start virtual nodes
  inject      give chips, nodes and links faults, and clear them
  stress-test test the chips of a job while it pauses
  switch-nic  move the traffic of a job's devices to their other network link, and back
  operator    run the AscendJob operator alone, against any Kubernetes
  noded       run the daemon that detects a node's faults, against any Kubernetes
  clusterd    run ClusterD alone, against any Kubernetes: it gathers faults and leads the recovery of jobs
  credentials make the Secrets that these need on a Kubernetes: tokens and certificates

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


def _up(argv: Sequence[str]) -> int:
    from evertrain.cli.up import main

    return main(argv)


def _down(argv: Sequence[str]) -> int:
    from evertrain.cli.down import main

    return main(argv)


def _run(argv: Sequence[str]) -> int:
    from evertrain.cli.run import main

    return main(argv)


def _get(argv: Sequence[str]) -> int:
    from evertrain.cli.objects import get

    return get(argv)


def _describe(argv: Sequence[str]) -> int:
    from evertrain.cli.objects import describe

    return describe(argv)


def _logs(argv: Sequence[str]) -> int:
    from evertrain.cli.objects import logs

    return logs(argv)


def _delete(argv: Sequence[str]) -> int:
    from evertrain.cli.objects import delete

    return delete(argv)


def _node(argv: Sequence[str]) -> int:
    from evertrain.cli.node import main

    return main(argv)


def _operator(argv: Sequence[str]) -> int:
    from evertrain.cli.operator import main

    return main(argv)


def _clusterd(argv: Sequence[str]) -> int:
    from evertrain.cli.clusterd import main

    return main(argv)


def _credentials(argv: Sequence[str]) -> int:
    from evertrain.cli.credentials import main

    return main(argv)


def _noded(argv: Sequence[str]) -> int:
    from evertrain.cli.noded import main

    return main(argv)


def _inject(argv: Sequence[str]) -> int:
    from evertrain.cli.inject import main

    return main(argv)


def _switch_nic(argv: Sequence[str]) -> int:
    from evertrain.cli.switch_nic import main

    return main(argv)


def _stress_test(argv: Sequence[str]) -> int:
    from evertrain.cli.stress_test import main

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
    "up": _up,
    "down": _down,
    "run": _run,
    "get": _get,
    "describe": _describe,
    "logs": _logs,
    "delete": _delete,
    "node": _node,
    "operator": _operator,
    "noded": _noded,
    "inject": _inject,
    "stress-test": _stress_test,
    "switch-nic": _switch_nic,
    "clusterd": _clusterd,
    "credentials": _credentials,
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
    try:
        return command(rest)
    except KeyboardInterrupt:  # while a command was only being loaded; those that run have their own ways
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
