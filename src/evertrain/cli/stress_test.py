"""`evertrain stress-test`: has the chips of a training job tested while it pauses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evertrain.cli import order_options, running

TESTS = {"aic": 0, "p2p": 1}


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    order_options.check(parser, arguments)
    if len(set(arguments.node)) != len(arguments.node):
        parser.error("a node is named twice")

    async def work() -> int:
        from evertrain.cli import stressing

        return await stressing.carry_out(arguments)

    return running.run("stress-test", work)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain stress-test",
        description="Test the chips of a running job, without ending it. ClusterD has the training pause after a\n"
        "step, the processes test their chips, and it goes on. A node on which a fault is found is isolated, and its\n"
        "pods are replaced: no step is lost.",
        epilog="examples:\n"
        "  evertrain stress-test my-job                           the chips of all nodes of the job\n"
        "  evertrain stress-test my-job --op aic,p2p              their connections, too\n"
        "  evertrain stress-test my-job --node node-1 --op p2p\n\n"
        "what it takes: a job with process-level recovery (recover-strategy) that trains already, and a TaskD worker\n"
        "in each process: docs/stress-test.md. It is for who runs the cluster: as a result may isolate a node, a\n"
        "job's own token does not do; the secret of the tokens is needed (--token-secret).\n"
        "exit code: 0 all chips are well; 1 one is not, or there was no test; 2 the command line makes no sense.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", metavar="JOB", help="an AscendJob")
    parser.add_argument(
        "--node", action="append", default=[], metavar="NODE", help="repeatable (default: all nodes of the job)"
    )
    parser.add_argument(
        "--op",
        type=tests,
        default=[TESTS["aic"]],
        metavar="LIST",
        help="aic (or 0) tests the chips, p2p (or 1) their connections (default aic)",
    )
    parser.add_argument(
        "--token-secret",
        type=Path,
        metavar="FILE",
        help="the secret that ClusterD and the operator make tokens from (default: that of the embedded cluster)",
    )
    order_options.add_options(parser, timeout=1800.0)
    return parser


def tests(text: str) -> list[int]:
    """`aic,p2p`, or as numbers."""
    known = TESTS | {str(number): number for number in TESTS.values()}
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word!r} is no test: there are aic and p2p")
    found = [known[word] for word in words]
    if len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a test twice")
    return found
