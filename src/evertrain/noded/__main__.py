"""`python -m evertrain.noded`: the daemon of one node, in a pod of a DaemonSet or beside the kubelet.

The options of the original are understood, with one dash as it writes them. Those that say how often it asks a
server's management controller are accepted and do nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from evertrain import __version__, aio
from evertrain.kube import daemon
from evertrain.kube.daemon import CannotStart
from evertrain.kube.metrics import page
from evertrain.noded.daemon import AUTO, DEVICE_SECONDS, NODE_SECONDS, OFF, ON, NodeDaemon
from evertrain.noded.detectors.ascend import Ascend
from evertrain.noded.detectors.base import Detector
from evertrain.noded.detectors.clock import Clock
from evertrain.noded.detectors.links import Links
from evertrain.noded.detectors.memory import MemoryErrors
from evertrain.noded.detectors.nvidia import Nvidia
from evertrain.noded.detectors.pressure import Pressure
from evertrain.noded.detectors.programs import Programs
from evertrain.noded.detectors.storage import Storage
from evertrain.noded.metrics import Figures
from evertrain.noded.sources import Sources

IGNORED = ("monitorPeriod", "reportInterval", "deviceResetTimeout")
HEALTH_PORT = 11254
PROGRAMS = Path("/etc/evertrain/noded.d")
DETECTORS = ("links", "memory", "storage", "pressure", "clock", "nvidia", "ascend", "programs")


def names(text: str) -> list[str]:
    return [name for name in (each.strip() for each in text.split(",")) if name]


def detector_names(text: str) -> list[str]:
    found = names(text)
    if unknown := sorted(set(found) - set(DETECTORS) - {"none"}):
        raise argparse.ArgumentTypeError(f"there is no detector {unknown[0]!r}; there are {', '.join(DETECTORS)}")
    return [name for name in found if name != "none"]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="evertrain noded",
        description="Watches one node for faults and publishes them for ClusterD, as the ConfigMaps\n"
        "mindx-dl-deviceinfo-NODE (chips) and mindx-dl-nodeinfo-NODE (everything else).",
        epilog="examples:\n"
        "  evertrain noded --node-name gpu-7 --links eth2,eth3    these links have to work\n"
        "  evertrain noded --detectors links,storage              only these detectors\n"
        "  evertrain noded --detectors none                       only what `evertrain inject` says",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "--node-name",
        default=os.environ.get("NODE_NAME") or socket.gethostname().lower(),
        metavar="NAME",
        help="of the Node object (default: $NODE_NAME, else the host name)",
    )
    found.add_argument(
        "--detectors",
        type=detector_names,
        default=list(DETECTORS),
        metavar="NAMES",
        help=f"of {', '.join(DETECTORS)}; or none (default: all, as far as there is something to detect)",
    )
    found.add_argument(
        "--links",
        type=names,
        default=[],
        metavar="NAMES",
        help="network interfaces to watch (default: all of hardware)",
    )
    found.add_argument(
        "--mounts", type=names, default=[], metavar="PATHS", help="file systems to watch (default: all on disks)"
    )
    found.add_argument(
        "--programs", type=Path, default=PROGRAMS, metavar="DIR", help=f"detectors of your own (default: {PROGRAMS})"
    )
    found.add_argument("--config", type=Path, metavar="FILE", help="levels of node faults, a NodeDConfiguration.json")
    found.add_argument(
        "--device-info",
        choices=(AUTO, ON, OFF),
        default=AUTO,
        help="publish the chips; auto: unless a device plugin does (default)",
    )
    found.add_argument("--sys", type=Path, default=Path("/sys"), metavar="DIR", help="where the machine's /sys is")
    found.add_argument("--proc", type=Path, default=Path("/proc"), metavar="DIR", help="where the machine's /proc is")
    found.add_argument("--host", type=Path, default=Path("/"), metavar="DIR", help="where the machine's / is")
    daemon.add_health(found, HEALTH_PORT)
    daemon.add_options(found, f"NodeD version: {__version__}", IGNORED)
    return found


def detectors(options: argparse.Namespace) -> list[Detector]:
    sys, proc = options.sys, options.proc
    # In a container, `self` would be ours. Process 1 of the machine sees all its mounts.
    mountinfo = proc / ("self" if proc == Path("/proc") else "1") / "mountinfo"
    environment = {"NODE_NAME": options.node_name, "NODED_SYS": str(sys), "NODED_PROC": str(proc)}
    found: list[Detector] = [
        Links(options.links, sys=sys),
        MemoryErrors(sys),
        Storage(options.mounts, sys=sys, mountinfo=mountinfo, host=options.host),
        Pressure(proc),
        Clock(),
        Nvidia(),
        Ascend(),
        Programs(options.programs, environment=environment),
    ]
    return [detector for detector in found if detector.name in options.detectors]


async def run(options: argparse.Namespace) -> None:
    config = ""
    if options.config:
        try:
            config = options.config.read_text()
        except (OSError, UnicodeError) as error:
            raise CannotStart(f"{options.config} can't be read: {error}") from None
    async with daemon.connected(options) as kube:
        sources = Sources(kube, options.node_name)
        node = NodeDaemon(
            kube,
            options.node_name,
            sources,
            detectors=detectors(options),
            device_info=options.device_info,
            config=config,
            device_seconds=DEVICE_SECONDS,
            node_seconds=NODE_SECONDS,
        )
        metrics = page(Figures(node, kube.answers).collect)
        async with daemon.health(options, sources.is_ready, metrics), aio.TaskGroup() as tasks:
            tasks.create_task(sources.run())
            tasks.create_task(node.run())


def main(arguments: Sequence[str] | None = None) -> int:
    return daemon.run("noded", parser().parse_args(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
