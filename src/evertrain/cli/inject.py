"""`evertrain inject`: give chips, nodes and switches faults, as if their detectors had seen them, and take them back.

The faults of a node are in a ConfigMap that its noded reads; so this works on any cluster whose nodes run noded. Public
faults go to ClusterD the way that other systems tell it of theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from evertrain.cli import running
from evertrain.cli.objects import cluster_options
from evertrain.faultcodes.levels import CHIP_LEVELS, NODE_LEVELS, NORMAL, SWITCH_LEVELS

CHIP_EXAMPLES = "80E01801 on-chip memory, 81078603 link down, A8028801 broken chip"


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)

    async def work() -> int:
        from evertrain.cli import injecting

        return await injecting.carry_out(arguments)

    return running.run("inject", work)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain inject",
        description="Inject faults into nodes of a cluster, and clear them. noded publishes them like those that it\n"
        "has found itself: ClusterD, the scheduler and the jobs can't tell the difference.",
        epilog="examples:\n"
        "  evertrain inject chip 80E01801 --node node-1 --chip 3      a memory fault: the training step is retried\n"
        "  evertrain inject chip 80E01801 --node node-1 --chip 3 --clear\n"
        "  evertrain inject chip A8028801 --node node-1 --chip 3 --for 60   a broken chip, for a minute\n"
        "  evertrain inject node 2C000031 --node node-1               the whole node is unfit\n"
        "  evertrain inject link-down --node node-1 --chip 0          its link to the other chips\n"
        "  evertrain inject sub-health --node node-1                  every chip works, but badly\n"
        "  evertrain inject list                                      what is injected now\n"
        "  evertrain inject clear                                     nothing any more\n\n"
        "What a code does is its level: docs/noded.md explains them. `evertrain inject KIND --help` explains a kind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cluster_options(parser)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    chip = _kind(
        kinds, "chip", "a fault of chips, by its code", f"codes: 8 or 9 hexadecimal digits, such as {CHIP_EXAMPLES}."
    )
    chip.add_argument("code", metavar="CODE")
    _node(chip)
    _chips(chip, "every chip")
    _about(chip, f"instead of the code's: {', '.join(each for each in CHIP_LEVELS if each != NORMAL)}")

    node = _kind(
        kinds,
        "node",
        "a fault of a node, by its code",
        "codes: 8 hexadecimal digits; PreSeparateFault keeps new pods away (0000001D), SeparateFault moves those that\n"
        "run there (2C000031). A code that is in no list is not reported, unless --level is given.",
    )
    node.add_argument("code", nargs="?", default="2C000031", metavar="CODE", help="default 2C000031")
    _node(node)
    node.add_argument("--device", default="CPU", metavar="TYPE", help="CPU, Memory, Storage, Network, … (default CPU)")
    node.add_argument("--id", type=_number, default=0, metavar="N", help="number of that device (default 0)")
    _about(node, f"instead of the code's: {', '.join(NODE_LEVELS)}")

    switch = _kind(
        kinds,
        "switch",
        "a fault of a node's switch, by its code",
        "codes: such as '[0x08520003,na,npu,na]' (in quotes, for the shell). One that is in no list is not reported,\n"
        "unless --level is given.",
    )
    switch.add_argument("code", metavar="CODE")
    _node(switch)
    switch.add_argument("--switch-chip", type=_number, default=0, metavar="N", help="of the switch (default 0)")
    switch.add_argument("--port", type=_number, default=0, metavar="N", help="of that chip (default 0)")
    _about(switch, f"instead of the code's: {', '.join(SWITCH_LEVELS)}")

    link = _kind(
        kinds,
        "link-down",
        "chips lose their link to the other chips",
        "The same as `chip 81078603`: harmless if it is short.",
    )
    sub = _kind(
        kinds,
        "sub-health",
        "chips work, but not as they should",
        "The same as `chip 81AD8605`. What happens then is what the job's label subHealthyStrategy says.",
    )
    for each in (link, sub):
        _node(each)
        _chips(each, "every chip")
        _about(each, "")

    public = _kind(
        kinds,
        "public",
        "a fault that another system reports to ClusterD",
        "codes: 9 characters that ClusterD is configured for, such as 010001001 (chips), 110001010 (node),\n"
        "210001007 (network), 310001005 (storage).",
    )
    public.add_argument("code", nargs="?", default="010001001", metavar="CODE", help="default 010001001")
    _node(public)
    _chips(public, "every chip")
    public.add_argument("--resource", default="CCAE", metavar="NAME", help="who reports it (default CCAE)")
    public.add_argument(
        "--type", choices=("NPU", "Node", "Network", "Storage"), help="default: by the code's first digit"
    )
    public.add_argument("--description", default="", metavar="TEXT", help="for people")
    public.add_argument("--once", action="store_true", help="an event: over by itself after 5 s")
    public.add_argument("--clear", action="store_true", help="it is over")

    listing = _kind(kinds, "list", "what is injected", "")
    listing.add_argument("--node", action="append", default=[], metavar="NODE", help="only of this node; repeatable")
    clear = _kind(
        kinds,
        "clear",
        "clear everything that was injected",
        "Also lets chips be used again that are kept away because faults came too often (ManuallySeparateNPU).",
    )
    clear.add_argument("--node", action="append", default=[], metavar="NODE", help="only of this node; repeatable")
    clear.add_argument("--no-wait", action="store_true", help="don't wait until noded has published it")
    return parser


def _kind(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, more: str
) -> argparse.ArgumentParser:
    found = kinds.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # The options may come behind the kind, too; one that isn't given there leaves what came before.
    cluster_options(found, kubeconfig=argparse.SUPPRESS, data_dir=argparse.SUPPRESS)
    return found


def _node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node", action="append", required=True, metavar="NODE", help="such as node-1; repeatable")


def _chips(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--chip", type=_numbers, metavar="N", help=f"number of the chip; several: 0,2 or 0-3 (default: {default})"
    )


def _about(parser: argparse.ArgumentParser, levels: str) -> None:
    if levels:
        parser.add_argument("--level", default="", help=levels)
    parser.add_argument(
        "--for", dest="seconds", type=running.seconds, metavar="S", help="clear it by itself after so many seconds"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="for people: shown in events")
    parser.add_argument("--clear", action="store_true", help="clear it")
    parser.add_argument("--no-wait", action="store_true", help="don't wait until noded has published it")


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first = _number(low)
        last = _number(high) if dash else first
        if last < first or last - first > 1024:
            raise argparse.ArgumentTypeError(f"{part!r} is not a range of chips")
        found += range(first, last + 1)
    return sorted(set(found))
