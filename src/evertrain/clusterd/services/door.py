"""What every call passes: the rate limit, and the translation of what goes wrong into documented errors.

| what | gRPC status |
|---|---|
| too many calls a second | UNKNOWN `qps exceeded, method=<full method>`, as the original |
| a message that can't be decoded | INTERNAL `grpc: error unmarshalling request`, as the original's gRPC says |
| a message of more than 4 MiB | RESOURCE_EXHAUSTED, by gRPC itself |
| a method that is not there | UNIMPLEMENTED, by gRPC itself |
| a missing or wrong token | UNAUTHENTICATED |
| the hub can't do it now | UNAVAILABLE, with the reason |
| a subscriber that does not read | RESOURCE_EXHAUSTED or DEADLINE_EXCEEDED |
| a bug | INTERNAL; what it was stands in ClusterD's log, not in the answer |
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from evertrain.clusterd.services.limits import Limits, Rates, exceeded
from evertrain.clusterd.services.ports import Unavailable
from evertrain.clusterd.services.publisher import Overrun

log = logging.getLogger(__name__)

UNREADABLE = "grpc: error unmarshalling request"
FAILED = "ClusterD failed at this; its log says how"
_unreadable = object()

Handler = Any
"""grpc.RpcMethodHandler, whose fields have no types."""


class Door(grpc.aio.ServerInterceptor):
    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates, self._clock = Rates(limits), clock
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        method = details.method
        if method not in self._guarded:
            handler = await continuation(details)
            if handler is None:
                return None
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Handler) -> Handler:
        decode, encode = _lenient(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._one(method, handler.unary_unary), decode, encode)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_many(method, handler.unary_stream), decode, encode)
        return grpc.stream_stream_rpc_method_handler(_both(method, handler.stream_stream), decode, encode)

    def _one(self, method: str, behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            if not self._rates.admits(method, self._clock()):
                await context.abort(grpc.StatusCode.UNKNOWN, exceeded(method))
            if request is _unreadable:
                await context.abort(grpc.StatusCode.INTERNAL, UNREADABLE)
            try:
                return await behaviour(request, context)
            except Exception as error:
                await _end(method, error, context)

        return call


def _many(method: str, behaviour: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> None:
        if request is _unreadable:
            await context.abort(grpc.StatusCode.INTERNAL, UNREADABLE)
        try:
            await behaviour(request, context)
        except Exception as error:
            await _end(method, error, context)

    return call


def _both(method: str, behaviour: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Any]:
    async def call(requests: AsyncIterator[Any], context: Any) -> None:
        async def readable() -> AsyncIterator[Any]:
            async for request in requests:
                if request is _unreadable:
                    await context.abort(grpc.StatusCode.INTERNAL, UNREADABLE)
                yield request

        try:
            await behaviour(readable(), context)
        except Exception as error:
            await _end(method, error, context)

    return call


async def _end(method: str, error: Exception, context: Any) -> None:
    if isinstance(error, grpc.aio.AbortError) or context.done():
        raise error
    if isinstance(error, Unavailable):
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    if isinstance(error, Overrun):
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    log.error("%s failed: %s", method, "".join(traceback.format_exception(error)))
    await context.abort(grpc.StatusCode.INTERNAL, FAILED)


def _lenient(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def lenient(content: bytes) -> Any:
        try:
            return decode(content)
        except DecodeError:
            return _unreadable

    return lenient
