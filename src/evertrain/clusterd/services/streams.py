"""From a subscription to the stream of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc

from evertrain import aio
from evertrain.clusterd.services.ports import Subscription

T = TypeVar("T")

SEND_LIMIT = 30.0
"""Seconds in which a listener has to take a message. gRPC holds some for it, so one that reads at all does."""


async def pour(
    context: Any, subscription: Subscription[T], message: Callable[[T], Any | None], first: Iterable[Any] = ()
) -> None:
    """Until the subscription ends, or the listener goes. What is translated into None is not sent."""
    try:
        await context.send_initial_metadata(())  # the stream is there, even before there is anything to say
        for made in first:
            await send(context, made)
        async for item in subscription:
            made = message(item)
            if made is not None:
                await send(context, made)
    finally:
        subscription.close()


async def pour_alive(
    context: Any, subscription: Subscription[T], message: Callable[[T], Any], beat: Callable[[], Any], period: float
) -> None:
    """And every `period` seconds a message that says that we are still here."""
    loop = asyncio.get_running_loop()
    try:
        await context.send_initial_metadata(())
        due = loop.time() + period
        while True:
            try:
                async with aio.timeout_at(due):
                    item = await anext(subscription)
            except TimeoutError:
                due = loop.time() + period
                await send(context, beat())
            except StopAsyncIteration:
                return
            else:
                await send(context, message(item))
    finally:
        subscription.close()


async def send(context: Any, message: Any) -> None:
    try:
        async with aio.timeout(SEND_LIMIT):
            await context.write(message)
    except TimeoutError:
        # An error would have to wait behind what is not read. gRPC resets the stream of a handler that is cancelled.
        raise asyncio.CancelledError(f"nothing was read for {SEND_LIMIT:g} s") from None


async def fail(context: Any, reason: str) -> None:
    """As the original's streams fail."""
    await context.abort(grpc.StatusCode.UNKNOWN, reason)
