from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.kubernetes_cluster import cluster, components
from tests.kubernetes_cluster.processes import die_with_parent


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kubernetes_cluster", description="a real Kubernetes for tests"
    )
    parser.add_argument("--build", action="store_true", help="make what it needs, and no more")
    parser.add_argument("--clean", action="store_true", help="remove what killed ones have left")
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("command", nargs="*", help="to run in the cluster; without, it runs until Ctrl-C")
    options = parser.parse_args()
    if options.keep:
        cluster.keep(options.keep)
        return 0
    if options.clean:
        print("\n".join(f"{name} removed" for name in cluster.clean()) or "nothing was left")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.build:
            print(components.get().folder)
            return 0
        return run(options.nodes, options.command)
    except components.Unsuitable as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(nodes: int, command: list[str]) -> int:
    with cluster.running(nodes) as running, socket.socket(socket.AF_UNIX) as listener:
        place = running.folder / "control"
        listener.bind(str(place))
        listener.listen()
        threading.Thread(target=running.serve, args=(listener,), daemon=True).start()
        environment = {**os.environ, **running.environment(), cluster.CONTROL: str(place)}
        if command:
            return subprocess.run(command, env=environment, preexec_fn=die_with_parent).returncode
        enter = f"nsenter --net=/proc/{os.getpid()}/ns/net"
        told = " ".join(["env", f"{cluster.CONTROL}={place}", *(f"{k}={v}" for k, v in running.environment().items())])
        print(f"The cluster runs, in a network of its own. To be in it:\n\n  {enter} {told} bash\n", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
