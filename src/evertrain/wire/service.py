"""Clients and servers of a service, made from its descriptor instead of generated code.

Generated gRPC code binds the package to the versions of grpcio that are at least as new as its generator. This needs
none, so an old training image can keep its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass


def stub(channel: Any, service: Any) -> Any:
    """An object with one callable for each method. `channel` may be of grpc or grpc.aio."""
    calls = {}
    for method in service.methods:
        kind = getattr(channel, _KINDS[method.client_streaming, method.server_streaming])
        calls[method.name] = kind(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=_decoder(GetMessageClass(method.output_type)),
        )
    return SimpleNamespace(**calls)


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    """None for what can't be decoded, as with gRPC, but without its stack traces in the log."""

    def decode(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return decode


def handlers(service: Any, servicer: object, *, lenient: bool = False, name: str = "") -> grpc.GenericRpcHandler:
    """For `server.add_generic_rpc_handlers`: the servicer's methods of the same names.

    `name` is another name of the service than its own. What can't be decoded is an error of the call, with a traceback
    in gRPC's log; with `lenient` it is an empty message, for servicers that refuse those.
    """
    table = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name, None)
        if behaviour is not None:
            make = getattr(grpc, f"{_KINDS[method.client_streaming, method.server_streaming]}_rpc_method_handler")
            table[method.name] = make(
                behaviour,
                request_deserializer=_request_decoder(GetMessageClass(method.input_type), lenient),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(name or service.full_name, table)


def _request_decoder(message: Any, lenient: bool) -> Any:
    def decode(content: bytes) -> Any:
        try:
            return message.FromString(content)
        except DecodeError:
            return message()

    return decode if lenient else message.FromString


_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}
"""By (client streams, server streams)."""
