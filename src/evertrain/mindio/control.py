"""Giving orders to a running job: a link to its controller, a command, its answer.

The launcher leaves a small file beside the events file with the controller's address, the job's token and the names of
its certificates, readable by its owner only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import tempfile
from typing import NamedTuple

from evertrain.mindio import framing, protocol
from evertrain.mindio.tls import TlsInfo
from evertrain.mindio.tls_stream import TlsSocket

SUFFIX = ".control"
_HELLO = 10.0
"""Seconds that a controller may take to accept a link; a frozen one never does."""


class ControlError(Exception):
    """The job can't be reached or does not accept the order; the text says why."""


class _Elsewhere(ControlError):
    """This controller is not the one in charge."""

    def __init__(self, reason: str, controllers: list[str]) -> None:
        super().__init__(f"the controller refused: {reason}")
        self.controllers = [parse_address(text) for text in controllers]


class Door(NamedTuple):
    """Where a job takes orders."""

    address: tuple[str, int]
    token: str
    tls: TlsInfo | None = None


def write_door(events: str, door: Door) -> str:
    """Leave the file; returns its path."""
    path = events + SUFFIX
    host, port = door.address
    content = {
        "address": f"{host}:{port}",
        "token": door.token,
        "tls": door.tls.environment() if door.tls else {},
    }
    # In a folder that others can write to, nobody must be able to have this file opened before us.
    fd, unfinished = tempfile.mkstemp(prefix=f"{os.path.basename(path)}.", dir=os.path.dirname(path) or ".")
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(unfinished, path)
    except OSError:
        os.unlink(unfinished)
        raise
    return path


def remove_door(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def read_door(events: str) -> Door:
    path = events + SUFFIX
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        certificates = TlsInfo.from_environment(content["tls"])
        return Door(parse_address(content["address"]), str(content["token"]), certificates)
    except FileNotFoundError:
        raise ControlError(f"{path} is not there: the job has ended, or it was started without --ft-events") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ControlError(f"{path} can't be used: {error}") from None


def parse_address(text: str) -> tuple[str, int]:
    try:
        host, port = protocol.address(text)
    except framing.ProtocolError:
        raise ControlError(f"expected HOST:PORT, got {text!r}") from None
    return host.strip("[]"), port


def ask(
    door: Door, command: protocol.Command, timeout: float | None = None, tls: ssl.SSLContext | None = None
) -> protocol.Answer:
    """Give an order to the controller in charge and wait for its answer; raises ControlError if there is none."""
    addresses = [door.address]
    for address in addresses:  # who stands by names the one in charge
        try:
            return _ask(address, door.token, command, timeout, tls)
        except _Elsewhere as refusal:
            addresses += [other for other in refusal.controllers if other not in addresses]
            last = refusal
    raise last


def _ask(
    address: tuple[str, int],
    token: str,
    command: protocol.Command,
    timeout: float | None,
    tls: ssl.SSLContext | None,
) -> protocol.Answer:
    host, port = address
    patience: float | None = _HELLO if timeout is None else min(timeout, _HELLO)
    try:
        link: socket.socket | TlsSocket = socket.create_connection(address, timeout=patience)
    except OSError as error:
        raise ControlError(f"the controller at {host}:{port} can't be reached: {error.strerror or error}") from None
    try:
        if tls is not None:
            assert isinstance(link, socket.socket)
            link = TlsSocket(link, tls)
        writer, reader = framing.FrameWriter(), protocol.FrameReader()
        hello = protocol.Hello(version=protocol.VERSION, token=token, role="control")
        link.sendall(writer.frame(hello) + writer.frame(command))
        while data := link.recv(65536):
            for message in reader.feed(data):
                if isinstance(message, protocol.Refused):
                    if message.retry:
                        raise _Elsewhere(message.reason, message.controllers)
                    raise ControlError(f"the controller refused: {message.reason}")
                if isinstance(message, protocol.Welcome):
                    patience = timeout  # from here on it takes as long as the order does
                    link.settimeout(timeout)
                if isinstance(message, protocol.Answer):
                    return message
        raise ControlError("no answer: the job has ended, or another controller has taken over; `status` tells")
    except TimeoutError:
        raise ControlError(f"no answer of {host}:{port} within {patience:g} s") from None
    except (OSError, framing.ProtocolError) as error:
        raise ControlError(f"the link to the controller broke: {error}") from None
    finally:
        link.close()
