"""The rendezvous store: keys by which the ranks of a generation find each other.

Every key belongs to a generation by its prefix. A request for a key of a generation that is not open is answered with
an error at once, and one that waits when its generation is closed is answered then: nobody waits for a peer that has
been called elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from evertrain.mindio.protocol import StoreAdd, StoreGet, StoreReply, StoreSet

Reply = Callable[[StoreReply], None]


@dataclass(slots=True)
class _Wait:
    request: int
    keys: list[str]
    missing: int
    reply: Reply


@dataclass(slots=True)
class _Keys:
    values: dict[str, bytes] = field(default_factory=dict)
    waits: dict[str, list[_Wait]] = field(default_factory=dict)


class GenerationStore:
    def __init__(self) -> None:
        self._generations: dict[str, _Keys] = {}

    def open(self, prefix: str) -> None:
        self._generations[prefix] = _Keys()

    def close(self, prefix: str) -> None:
        keys = self._generations.pop(prefix, None)
        if keys is None:
            return
        waits = {id(wait): wait for waiting in keys.waits.values() for wait in waiting}
        for wait in waits.values():
            wait.reply(StoreReply(request=wait.request, error=f"generation {prefix} was abandoned"))

    def handle(self, message: StoreSet | StoreGet | StoreAdd, reply: Reply) -> None:
        match message:
            case StoreSet(key=key, value=value):
                keys = self._of(key)
                if keys is not None:
                    self._put(keys, key, value)
            case StoreAdd(request=request, key=key, amount=amount):
                keys = self._of(key)
                if keys is None:
                    return reply(StoreReply(request=request, error=_closed(key)))
                try:
                    total = b"%d" % (int(keys.values.get(key, b"0")) + amount)
                except ValueError:
                    return reply(StoreReply(request=request, error=f"{key!r} is not a counter"))
                self._put(keys, key, total)
                reply(StoreReply(request=request, values=[total]))
            case StoreGet(request=request, keys=wanted):
                self._get(request, wanted, reply)

    def _get(self, request: int, wanted: list[str], reply: Reply) -> None:
        generations = {id(keys): keys for keys in map(self._of, wanted) if keys is not None}
        closed = [key for key in wanted if self._of(key) is None]
        if closed or len(generations) > 1:
            error = _closed(closed[0]) if closed else "one request names keys of several generations"
            return reply(StoreReply(request=request, error=error))
        if not generations:
            return reply(StoreReply(request=request))
        (keys,) = generations.values()
        missing = {key for key in wanted if key not in keys.values}
        if not missing:
            return reply(StoreReply(request=request, values=[keys.values[key] for key in wanted]))
        wait = _Wait(request, wanted, len(missing), reply)
        for key in missing:
            keys.waits.setdefault(key, []).append(wait)

    def _put(self, keys: _Keys, key: str, value: bytes) -> None:
        keys.values[key] = value
        for wait in keys.waits.pop(key, ()):
            wait.missing -= 1
            if not wait.missing:
                wait.reply(StoreReply(request=wait.request, values=[keys.values[name] for name in wait.keys]))

    def _of(self, key: str) -> _Keys | None:
        return self._generations.get(key.partition("/")[0] + "/")


def _closed(key: str) -> str:
    return f"the generation of {key!r} is not open"
