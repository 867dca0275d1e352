"""Frames that nobody should send: noise, damaged frames, messages with any values in any order, lies about lengths."""

from __future__ import annotations

import random
import struct
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from evertrain.mindio import framing

_INTS = (-(2**63), -(2**31), -2, -1, 0, 0, 1, 1, 2, 3, 4, 7, 255, 2**16, 2**31 - 1, 2**53, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -1.0, 1e-300, 1.0, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", "0", "state", "rank", "agent", "control", "standby", "controller", "exit", "hang", "uce", "script", "repair",
    "g1/a", "g1/b", "prelude/x", "prelude/", "/", "127.0.0.1:1", "pause", "continue", "status", "hot-switch",
    "\0", "§" * 40, "x" * 5000, "%s%n{0}",
)  # fmt: skip


_REMEMBERED = 4000


class Fuzzer:
    """All of it follows from the seed."""

    def __init__(self, seed: int, any_message: Any, encode: Callable[[Any], bytes] = msgspec.msgpack.encode) -> None:
        self.random = random.Random(seed)
        self._classes = typing.get_args(any_message)
        self._encode = encode
        self._said: list[msgspec.Raw] = []
        self._hints = {cls: typing.get_type_hints(cls) for cls in self._classes}

    def message(self) -> Any:
        """A message of any kind with any values of the right types."""
        return self.of(self.random.choice(self._classes))

    def of(self, cls: Any) -> Any:
        hints = self._hints.get(cls) or typing.get_type_hints(cls)
        values = {}
        for field in msgspec.structs.fields(cls):
            if field.required or self.random.random() < 0.6:
                values[field.name] = self.value(hints[field.name])
        return cls(**values)

    def value(self, kind: Any, depth: int = 0) -> Any:
        pick, origin, arguments = self.random, typing.get_origin(kind), typing.get_args(kind)
        if kind is bool:
            return pick.random() < 0.5
        if kind is int:
            return pick.choice(_INTS) if pick.random() < 0.7 else pick.randrange(8)
        if kind is float:
            return pick.choice(_FLOATS) if pick.random() < 0.5 else pick.random() * 1e6
        if kind is str:
            return pick.choice(_TEXTS)
        if kind is bytes:
            return pick.randbytes(pick.choice((0, 1, 8, 3000)))
        if kind is type(None):
            return None
        if kind is Any:
            return pick.choice((None, 1, "x", [1], {"a": 1.5}, b"y"))
        if origin in (list, set, frozenset):
            return origin(self.value(arguments[0], depth + 1) for _ in range(pick.choice((0, 0, 1, 2, 5, 40))))
        if origin is tuple:
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return tuple(self.value(arguments[0], depth + 1) for _ in range(pick.choice((0, 1, 2, 5))))
            return tuple(self.value(argument, depth + 1) for argument in arguments)
        if origin is dict:
            size = pick.choice((0, 1, 3))
            return {self.value(arguments[0]): self.value(arguments[1], depth + 1) for _ in range(size)}
        if origin in (typing.Union, types.UnionType):
            return self.value(pick.choice(arguments), depth + 1)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.of(kind)
        if isinstance(kind, type) and hasattr(kind, "__members__"):
            return pick.choice(list(kind))  # type: ignore[call-overload]
        raise AssertionError(f"the fuzzer does not know values of {kind}")

    def valid(self, serial: int) -> bytes:
        """Most are messages that were said before, since making one takes longer than reading it."""
        if len(self._said) == _REMEMBERED and self.random.random() < 0.9:
            return framing.encode(serial, self.random.choice(self._said))
        message = framing.prepare(self.message())
        if len(self._said) < _REMEMBERED:
            self._said.append(message)
        else:
            self._said[self.random.randrange(_REMEMBERED)] = message
        return framing.encode(serial, message)

    def stream(self, serial: int) -> Iterator[bytes]:
        """What one peer says. Half of them begin to talk nonsense at once, the others only at the end."""
        talk = self.random.randrange(1, 60)
        sober = 0 if self.random.random() < 0.5 else talk - 1
        for number in range(talk):
            yield self.valid(serial + number) if number < sober else self.piece(serial + number)

    def piece(self, serial: int) -> bytes:
        """One piece of a stream: a frame or what pretends to be one."""
        pick = self.random
        kind = pick.random()
        if kind < 0.5:
            return self.valid(serial)
        if kind < 0.7:
            return self._damaged(bytearray(self.valid(serial)))
        if kind < 0.78:
            body = self._encode([serial, {"type": pick.choice(self._classes).__name__, "rank": self.value(Any)}])
            return struct.pack(">I", len(body)) + body
        if kind < 0.86:
            return pick.randbytes(pick.randrange(1, 300))
        if kind < 0.92:
            body = pick.randbytes(pick.randrange(60))
            return struct.pack(">I", len(body)) + body
        if kind < 0.95:
            length = pick.choice((framing.MAX_FRAME + 1, 2**31, 2**32 - 1, framing.MAX_FRAME, framing.MAX_HELLO))
            return struct.pack(">I", length) + pick.randbytes(50)
        if kind < 0.98:
            nested = b"\x91" * pick.choice((10, 1000, 100_000))
            return struct.pack(">I", len(nested)) + nested
        return pick.choice((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0\0\0\0"))

    def _damaged(self, frame: bytearray) -> bytes:
        pick = self.random
        for _ in range(pick.randrange(1, 4)):
            at = pick.randrange(len(frame))
            match pick.randrange(4):
                case 0:
                    frame[at] ^= 1 << pick.randrange(8)
                case 1:
                    del frame[at:]
                case 2:
                    frame[at:at] = pick.randbytes(pick.randrange(1, 9))
                case 3:
                    frame[at] = pick.randrange(256)
            if not frame:
                return b"\0"
        return bytes(frame)

    def chunks(self, data: bytes) -> Iterator[bytes]:
        """As it may arrive: mostly whole, sometimes in two, sometimes in drops."""
        kind = self.random.random()
        if kind < 0.9 or len(data) < 3:
            yield data
        elif kind < 0.98 or len(data) > 500:
            cut = self.random.randrange(1, len(data))
            yield from (data[:cut], data[cut:])
        else:
            yield from (data[at : at + 1] for at in range(len(data)))
