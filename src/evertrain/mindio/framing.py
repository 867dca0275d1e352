"""How messages travel on a link.

A frame is a 4-byte big-endian length and a msgpack array `[serial, message]`. Serials count up on each link and in
each direction; a frame whose serial is not above the last one is a duplicate and is dropped. Nothing that comes from
the network is ever unpickled: every message is a typed struct that msgspec validates while decoding.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MAX_FRAME = 10 * 1024 * 1024
MAX_HELLO = 1024 * 1024
"""A stranger may not make us keep more than this."""
_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The peer does not speak this protocol; the link must be closed."""


_encoder = msgspec.msgpack.Encoder()


def encode(serial: int, message: msgspec.Struct | msgspec.Raw) -> bytes:
    body = _encoder.encode((serial, message))
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes; a frame may have {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def prepare(message: msgspec.Struct) -> msgspec.Raw:
    """Encode a message once that goes out on many links; only the serials differ."""
    return msgspec.Raw(_encoder.encode(message))


class FrameReader:
    """Turns a stream of bytes into messages. Feed it what arrives; it keeps the rest and drops duplicates."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any], limit: int = MAX_FRAME) -> None:
        self._decoder = decoder
        self.limit = limit
        """Bytes that a frame may have; less for a peer that has not shown its token yet."""
        self._buffer = bytearray()
        self._last = 0

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes was announced; {self.limit} is the limit")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                serial, message = self._decoder.decode(memoryview(self._buffer)[_LENGTH.size : end].tobytes())
            except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
                raise ProtocolError(f"a frame could not be read: {error}") from None
            del self._buffer[:end]
            if serial > self._last:
                self._last = serial
                messages.append(message)
        return messages


class FrameWriter:
    """Numbers and encodes the messages of one direction of a link."""

    def __init__(self) -> None:
        self._serial = 0

    def frame(self, message: msgspec.Struct | msgspec.Raw) -> bytes:
        self._serial += 1
        return encode(self._serial, message)
