"""grpc.reflection: what is served here, for grpcurl and its like. Our descriptors are in a pool of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from evertrain.clusterd.services.streams import send
from evertrain.wire import reflection_pb2 as wire
from evertrain.wire.pool import pool

SERVICE = wire.DESCRIPTOR.services_by_name["ServerReflection"]
NEWER_NAME = "grpc.reflection.v1.ServerReflection"
"""The same messages under the name that newer tools ask for first."""


class ServerReflection:
    """Needs no token: it tells what our documents do."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted(services)

    async def ServerReflectionInfo(self, requests: AsyncIterator[wire.ServerReflectionRequest], context: Any) -> None:
        async for request in requests:
            await send(context, self._answer(request))

    def _answer(self, request: wire.ServerReflectionRequest) -> wire.ServerReflectionResponse:
        response = wire.ServerReflectionResponse(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        try:
            if kind == "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            elif kind == "file_by_filename":
                response.file_descriptor_response.CopyFrom(_files(pool.FindFileByName(request.file_by_filename)))
            elif kind == "file_containing_symbol":
                found = pool.FindFileContainingSymbol(request.file_containing_symbol)
                response.file_descriptor_response.CopyFrom(_files(found))
            elif kind == "all_extension_numbers_of_type":
                name = request.all_extension_numbers_of_type
                pool.FindMessageTypeByName(name)
                response.all_extension_numbers_response.base_type_name = name  # proto3: there are no extensions
            else:
                raise KeyError
        except KeyError:
            code, text = grpc.StatusCode.NOT_FOUND.value
            response.error_response.error_code, response.error_response.error_message = code, text
        return response


def _files(file: Any) -> wire.FileDescriptorResponse:
    """With all that it needs."""
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        each = waiting.pop()
        if each.name not in found:
            found[each.name] = each.serialized_pb
            waiting.extend(each.dependencies)
    return wire.FileDescriptorResponse(file_descriptor_proto=found.values())
