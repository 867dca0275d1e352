"""`evertrain switch-nic`: moves the traffic of devices of a training job to their other network link, and back."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from evertrain.cli import nics, order_options, running

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    order_options.check(parser, arguments)

    async def work() -> int:
        from evertrain.cli import switching

        return await switching.carry_out(arguments)

    return running.run("switch-nic", work)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain switch-nic",
        description="Move the traffic of devices of a running job to their other network link, and back: before a\n"
        "switch is upgraded, or after a port was repaired. ClusterD has the training pause after a step, all workers\n"
        "change over, and it goes on; no process ends, no step is lost. All devices change, or none does.",
        epilog="examples:\n"
        "  evertrain switch-nic my-job --node node-1 --dev [device0,device8] --op [true,true]     to the backup link\n"
        "  evertrain switch-nic my-job --node node-1 --dev [device0,device8] --op [false,false]   and back\n"
        "  evertrain switch-nic my-job --node node-1 --dev 0 --op true       one device; numbers will do\n"
        "  evertrain switch-nic my-job --op true                             all devices on all nodes of the job\n"
        "  evertrain switch-nic my-job --node node-1 --dev 0 --op true --node node-2 --dev 8 --op false\n\n"
        "what it takes: a job with process-level recovery (recover-strategy) that trains already, a TaskD worker in\n"
        "each process, nodes of a super pod, and links that are up: docs/link-failover.md.\n"
        "exit code: 0 the links were switched; 1 they were not, and the training goes on as it was, or ClusterD\n"
        "refused it: something else goes on, or an argument is wrong for this job; 2 the command line makes no sense.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", metavar="JOB", help="an AscendJob")
    parser.add_argument(
        "--node", action="append", default=[], metavar="NODE", help="repeatable (default: all nodes of the job)"
    )
    parser.add_argument(
        "--dev",
        action="append",
        default=[],
        type=_typed(nics.devices),
        metavar="LIST",
        help="its devices, such as device0,device8; once for all nodes or behind each --node (default: all of the job)",
    )
    parser.add_argument(
        "--op",
        action="append",
        required=True,
        type=_typed(nics.ops),
        metavar="LIST",
        help="for each device: true, to its backup link, or false, back to its primary one; one word counts for all",
    )
    order_options.add_options(parser, timeout=900.0)
    return parser


def _typed(function: Callable[[str], T]) -> Callable[[str], T]:
    def typed(text: str) -> T:
        try:
            return function(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed
