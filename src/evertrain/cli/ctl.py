"""`evertrain ctl ORDER`: pause a running job, let it continue, exchange a process, ask how it is."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence

from evertrain.mindio import control, protocol, tls
from evertrain.mindio.control import ControlError, Door


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    command = protocol.Command(
        request=1,
        order=arguments.order,
        rank=getattr(arguments, "rank", -1),
        timeout=getattr(arguments, "timeout", 0.0),
        exit_after=getattr(arguments, "exit", False),
    )
    try:
        door = _door(arguments)
        info = tls.TlsInfo.from_environment(os.environ) or door.tls
        answer = control.ask(door, command, arguments.wait, tls.client_context(info) if info else None)
    except (ControlError, tls.TlsError) as error:
        print(f"evertrain ctl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not answer.ok:
        print(f"evertrain ctl: {answer.text}", file=sys.stderr)
        return 1
    print(json.dumps({"state": answer.text, **answer.fields}) if arguments.order == "status" else answer.text)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain ctl",
        description="Give an order to a running job and wait until it is carried out. The job is named by its events "
        "file, or by the address of its controller with the job's token in EVERTRAIN_TOKEN and, if it has "
        f"certificates, the files of one's own in {', '.join(tls.VARIABLES)}.",
    )
    parser.add_argument("--events", metavar="FILE", help="the file that the job was given with --ft-events")
    parser.add_argument("--address", metavar="HOST:PORT", help="the controller (default: EVERTRAIN_CONTROL)")
    parser.add_argument("--wait", type=seconds, metavar="SECONDS", help="how long to wait for the answer")
    orders = parser.add_subparsers(dest="order", required=True, metavar="ORDER")
    pause = orders.add_parser("pause", help="have all ranks wait at the end of a step")
    pause.add_argument("--timeout", type=float, default=0.0, metavar="S", help="go on after this time (default 600)")
    pause.add_argument("--exit", action="store_true", help="end the job after that time instead")
    orders.add_parser("continue", help="end a pause")
    switch = orders.add_parser("hot-switch", help="give a rank a new process, prepared while the old one trains")
    switch.add_argument("--rank", type=int, required=True)
    orders.add_parser("cancel-switch", help="give up a switch that is being prepared")
    orders.add_parser("status", help="print what the job is doing as JSON")
    return parser


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < threading.TIMEOUT_MAX:
        raise ValueError
    return value


def _door(arguments: argparse.Namespace) -> Door:
    if arguments.events:
        return control.read_door(arguments.events)
    address = arguments.address or os.environ.get("EVERTRAIN_CONTROL") or os.environ.get("EVERTRAIN_CONTROLLER", "")
    token = os.environ.get("EVERTRAIN_TOKEN", "")
    if not address:
        raise ControlError("which job? Give --events FILE, or --address HOST:PORT")
    if not token:
        raise ControlError("the job's token is missing: put it into EVERTRAIN_TOKEN, or use --events FILE")
    return Door(control.parse_address(address.split(",")[0]), token)
