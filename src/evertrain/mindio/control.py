"""Giving orders to a running job: a link to its controller, a command, its answer.

The launcher leaves a small file beside the events file with the controller's address and the job's token, readable by
its owner only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
from typing import NamedTuple

from evertrain.mindio import framing, protocol
from evertrain.mindio.tls_stream import TlsSocket

SUFFIX = ".control"


class ControlError(Exception):
    """The job can't be reached or does not accept the order; the text says why."""


class Door(NamedTuple):
    """Where a job takes orders."""

    address: tuple[str, int]
    token: str


def write_door(events: str, address: str, token: str) -> str:
    """Leave the file; returns its path."""
    path = events + SUFFIX
    unfinished = f"{path}.{os.getpid()}"
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump({"address": address, "token": token}, file)
    os.replace(unfinished, path)
    return path


def remove_door(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def read_door(events: str) -> Door:
    path = events + SUFFIX
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        return Door(parse_address(content["address"]), str(content["token"]))
    except FileNotFoundError:
        raise ControlError(f"{path} is not there: the job has ended, or it was started without --ft-events") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ControlError(f"{path} can't be used: {error}") from None


def parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise ControlError(f"expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def ask(
    door: Door, command: protocol.Command, timeout: float | None = None, tls: ssl.SSLContext | None = None
) -> protocol.Answer:
    """Give an order and wait for its answer; raises ControlError if there is none."""
    host, port = door.address
    try:
        link: socket.socket | TlsSocket = socket.create_connection(door.address, timeout=10.0)
    except OSError as error:
        raise ControlError(f"the controller at {host}:{port} can't be reached: {error.strerror or error}") from None
    try:
        if tls is not None:
            assert isinstance(link, socket.socket)
            link = TlsSocket(link, tls)
        link.settimeout(timeout)
        writer, reader = framing.FrameWriter(), protocol.FrameReader()
        hello = protocol.Hello(version=protocol.VERSION, token=door.token, role="control")
        link.sendall(writer.frame(hello) + writer.frame(command))
        while data := link.recv(65536):
            for message in reader.feed(data):
                if isinstance(message, protocol.Refused):
                    raise ControlError(f"the controller refused: {message.reason}")
                if isinstance(message, protocol.Answer):
                    return message
        raise ControlError("the job ended before it had an answer")
    except TimeoutError:
        raise ControlError(f"no answer within {timeout:g} s") from None
    except (OSError, framing.ProtocolError) as error:
        raise ControlError(f"the link to the controller broke: {error}") from None
    finally:
        link.close()
