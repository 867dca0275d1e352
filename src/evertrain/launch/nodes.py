"""What the command line says about nodes, and the secret that they share."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from evertrain.launch.errors import ConfigError

TOKEN = "EVERTRAIN_TOKEN"
_SHORTEST_TOKEN = 16


def count(values: Mapping[str, Any], sources: Mapping[str, str]) -> int:
    """The number of nodes, after it was checked against the rank of this one."""
    text = values["nnodes"]
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match:
        raise ConfigError(f"--nnodes: expected a number or MIN:MAX, got {text!r}")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 0 < low <= high:
        raise ConfigError(f"--nnodes: the minimum must be positive and not above the maximum, got {text!r}")
    rank = values["node_rank"]
    if high == 1:
        if rank != 0:
            raise ConfigError(f"--node-rank {rank}: there is one node, and its rank is 0")
        return high
    if values["standalone"]:
        raise ConfigError(f"--standalone means one node; leave it out for --nnodes {text}")
    if sources["node_rank"] == "default":
        raise ConfigError(f"--nnodes {text}: say which of the nodes this is with --node-rank 0 to {high - 1}")
    if not 0 <= rank < high:
        raise ConfigError(f"--node-rank {rank}: the ranks of {high} nodes are 0 to {high - 1}")
    return high


def loss(values: Mapping[str, Any], sources: Mapping[str, str]) -> tuple[str, int]:
    """What to do about a lost node, and how many nodes have to be there at least: `--nnodes 1:2` allows to go on."""
    low, _, high = values["nnodes"].partition(":")
    elastic = bool(high) and int(low) < int(high)
    mode = "shrink" if elastic and sources["node_loss"] == "default" else values["node_loss"]
    return mode, int(low) if elastic else 1


def token(path: str | None, environ: Mapping[str, str], nnodes: int) -> str:
    """The job's token; empty if none was given and one can be made up, because nobody elsewhere has to know it."""
    found, where = environ.get(TOKEN, ""), TOKEN
    if path:
        where = "--ft-token-file"
        try:
            with open(path, encoding="ascii") as file:
                status = os.fstat(file.fileno())
                found = file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{where}: cannot read {path}: {reason}") from None
        if status.st_mode & 0o077:
            raise ConfigError(f"{where}: {path} can be read by other users; chmod 600 it")
    if not found and nnodes == 1 and not path:
        return ""
    if not found:
        raise ConfigError(
            "a job on several nodes needs a secret that all of them share: make one with "
            "`(umask 077; openssl rand -hex 16 > token)`, copy it to every node and give --ft-token-file token, or set "
            f"{TOKEN}"
        )
    if len(found) < _SHORTEST_TOKEN or not found.isprintable():
        raise ConfigError(f"{where}: a token has at least {_SHORTEST_TOKEN} printable characters")
    return found


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one, or to itself. Nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def refuse_open_network(host: str) -> None:
    """Whoever can read the links of a job can read its token."""
    from evertrain.mindio.controller.server import is_loopback

    if not is_loopback(host):
        raise ConfigError(
            f"--master-addr: {host} can be reached from other machines and the links would not be encrypted; give "
            "--ft-tls-cert, --ft-tls-key and --ft-tls-ca, or --ft-insecure if that is what you want"
        )
