"""The same for the callback interface: its controller and the link of its processor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from evertrain import aio
from evertrain.mindio import framing, protocol
from evertrain.mindio.tft import link as processor_link
from evertrain.mindio.tft import messages
from evertrain.mindio.tft.controller import Controller, Link
from evertrain.mindio.tft.settings import Settings
from tests.fuzz.frames import Fuzzer
from tests.fuzz.targets import Growth, Script, Sink
from tests.fuzz.test_frames import FRAMES as ASKED
from tests.fuzz.test_frames import MAX_GROWTH, SEED, TOKEN

FRAMES = ASKED if ASKED > 20_000 else 8_000

pytestmark = pytest.mark.timeout(120 + FRAMES // 500)


@pytest.fixture(autouse=True)
def _quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    with capsys.disabled():
        print(f"\n  {FRAMES} frames, EVERTRAIN_FUZZ_SEED={SEED} ", end="", flush=True)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _drive(link: Link, fuzzer: Fuzzer, serial: int) -> int:
    count = 0
    for count, piece in enumerate(fuzzer.stream(serial + 2), 1):
        for chunk in fuzzer.chunks(piece):
            if link._transport is None or link._transport.is_closing():
                return count
            link.data_received(chunk)
    return count


def test_strangers_at_the_controller() -> None:
    async def scenario() -> None:
        controller = Controller(Settings(world_size=4, arf=True), "127.0.0.1", token=TOKEN)
        member = Link(controller)
        member.connection_made(Sink())
        member.data_received(framing.encode(1, messages.Hello(version=1, rank=0, token=TOKEN, world_size=4)))
        member.data_received(framing.encode(2, messages.Register()))
        fuzzer, growth, done = Fuzzer(SEED, messages.AnyMessage), Growth(FRAMES), 0
        while done < FRAMES:
            link = Link(controller)
            link.connection_made(Sink())
            done += _drive(link, fuzzer, 0)
            link.connection_lost(None)
            growth.look(done)
            await asyncio.sleep(0)  # the loop forgets cancelled timers only when it runs
        assert growth.megabytes() < MAX_GROWTH, f"seed {SEED}"
        assert controller.linked == 1 and len(controller._links) == 1, f"seed {SEED}"
        assert member._transport is not None and not member._transport.is_closing()
        member.connection_lost(None)

    aio.run(scenario())


def test_members_that_say_anything() -> None:
    async def scenario() -> None:
        fuzzer, growth, done, jobs = Fuzzer(SEED, messages.AnyMessage), Growth(FRAMES), 0, 0
        while done < FRAMES:
            pick = fuzzer.random
            controller = Controller(
                Settings(world_size=4, arf=pick.random() < 0.5, zit=pick.random() < 0.5), "127.0.0.1", token=TOKEN
            )
            jobs += 1
            links: list[Link] = []
            for _ in range(60):
                link = Link(controller)
                links.append(link)
                link.connection_made(Sink())
                rank = pick.randrange(4) if pick.random() < 0.9 else fuzzer.value(int)
                hello = messages.Hello(version=messages.VERSION, rank=rank, token=TOKEN, world_size=4)
                link.data_received(framing.encode(1, hello))
                link.data_received(framing.encode(2, messages.Register()))
                for each in pick.sample(links, min(len(links), 3)):
                    done += _drive(each, fuzzer, done)
                    if each._transport is not None and each._transport.is_closing():
                        each.connection_lost(None)
                        links.remove(each)
                await asyncio.sleep(0)
                growth.look(done)
                if done >= FRAMES or controller.machine.ended is not None:
                    break
            for link in links:
                if link._transport is not None:
                    link.connection_lost(None)
            if controller._tick is not None:
                controller._tick.cancel()
        assert growth.megabytes() < MAX_GROWTH, f"seed {SEED}"

    aio.run(scenario())


def test_a_controller_that_says_anything() -> None:
    """At the processor's link: it ends at the first piece that can't be read, and whole messages come through."""
    fuzzer, growth, done, heard = Fuzzer(SEED, messages.AnyMessage), Growth(FRAMES), 0, 0

    def counted(pieces: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal done
        for piece in pieces:
            done += 1
            yield piece

    def hear(message: object) -> None:
        nonlocal heard
        assert isinstance(message, messages.Message)
        heard += 1

    while done < FRAMES:
        peer = Script(chunk for piece in counted(fuzzer.stream(1)) for chunk in fuzzer.chunks(piece))
        reader = protocol.FrameReader(messages.decoder)
        link = processor_link.Link(peer, framing.FrameWriter(), reader, [])  # type: ignore[arg-type]
        link._on_message = hear
        with pytest.raises((OSError, framing.ProtocolError)):
            link._read()
        link._end()
        growth.look(done)
    assert heard > FRAMES // 10
    assert growth.megabytes() < MAX_GROWTH, f"seed {SEED}"
