"""Options of the commands that give ClusterD an order about a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from evertrain.cli import running
from evertrain.cli.objects import cluster_options


def add_options(parser: argparse.ArgumentParser, timeout: float) -> None:
    parser.add_argument("-n", "--namespace", metavar="NAME", help="of the job; default: that of the kubeconfig")
    parser.add_argument(
        "--timeout",
        type=running.seconds,
        default=timeout,
        metavar="S",
        help=f"wait for the result so long (default {timeout:g})",
    )
    cluster_options(parser)
    parser.add_argument(
        "--clusterd", metavar="HOST:PORT", help="where ClusterD serves (default: the address of its Service)"
    )
    for name, what in (("ca", "of the authority"), ("cert", "with your certificate"), ("key", "with its key")):
        parser.add_argument(
            f"--tls-{name}", type=Path, metavar="FILE", help=f"{what}, where ClusterD asks for certificates"
        )


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    certificates = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    if any(certificates) and not all(certificates):
        parser.error("--tls-ca, --tls-cert and --tls-key belong together")
