"""The controller in a process of its own.

Prints one JSON line with its address when it listens, and ends with the job's exit code. The job token comes by the
environment, never by the command line, which every user of the machine can read.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time

from evertrain import aio
from evertrain.mindio import tls
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Server
from evertrain.mindio.timing import DEFAULT_BOUND, Timing, TimingError
from evertrain.mindio.tls_dates import DateWatch


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m evertrain.mindio.controller",
        description="The controller of one job. The job token is read from EVERTRAIN_TOKEN.",
    )
    result.add_argument("--world-size", type=int, required=True, help="number of ranks")
    result.add_argument("--nnodes", type=int, default=1, help="nodes, each with an agent of its own (%(default)s)")
    result.add_argument("--bound", type=float, default=DEFAULT_BOUND, help="detection bound in seconds (%(default)s)")
    result.add_argument("--max-restarts", type=int, default=0, help="restarts of all processes (%(default)s)")
    result.add_argument("--no-dump", action="store_true", help="write no checkpoint before a restart or the end")
    result.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    result.add_argument("--port", type=int, default=0, help="port to listen on; 0 for any (%(default)s)")
    result.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM); every link is then TLS 1.3")
    result.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    result.add_argument("--tls-ca", metavar="FILE", help="certificate (PEM) of the authority of all nodes")
    result.add_argument(
        "--insecure",
        "--allow-remote",
        action="store_true",
        help="listen beyond this machine without TLS; everybody on the network can read the links",
    )
    return result


async def serve(server: Server, certificates: tls.TlsInfo | None = None) -> int:
    await server.start()
    lookout = tls.Lookout.from_environment(os.environ)
    dates = DateWatch(certificates, lookout, logging.warning) if certificates else None
    host, port = server.address
    print(json.dumps({"event": "listening", "host": host, "port": port, "pid": os.getpid()}), flush=True)
    try:
        code, reason = await server.serve_until_ended()
    finally:
        if dates is not None:
            dates.close()
        await server.close()
    print(json.dumps({"event": "ended", "code": code, "reason": reason}), flush=True)
    return code


def main(argv: list[str] | None = None) -> int:
    arguments = parser()
    options = arguments.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    files = (options.tls_cert, options.tls_key, options.tls_ca)
    if any(files) and not all(files):
        arguments.error("TLS needs all of --tls-cert, --tls-key and --tls-ca")
    info = tls.TlsInfo.from_files(*files) if all(files) else None
    try:
        machine = Machine(
            options.world_size,
            Timing.derive(options.bound, options.nnodes),
            max_restarts=options.max_restarts,
            nnodes=options.nnodes,
            can_dump=not options.no_dump,
            wall_offset=time.time() - time.monotonic(),
        )
        server = Server(
            machine,
            os.environ.get("EVERTRAIN_TOKEN", ""),
            options.host,
            options.port,
            tls=tls.server_context(info) if info else None,
            allow_remote=options.insecure,
        )
    except (ValueError, TimingError) as error:
        arguments.error(str(error))
    try:
        return aio.run(serve(server, info))
    except KeyboardInterrupt:
        return 130
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        arguments.error(f"can't listen on {options.host}:{options.port}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
