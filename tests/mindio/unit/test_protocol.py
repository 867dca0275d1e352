"""Framing: what one side writes the other one reads, however it arrives, and nothing else gets in."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.mindio import framing
from evertrain.mindio import protocol as p

MESSAGES: list[p.Message] = [
    p.Out(step=3, clean=True, fault=p.Fault(kind="uce", rank=1, exit_code=-9, stack="s\n")),
    p.Join(generation=2, spans=[(0, 1)], step=3, prefix="g2/"),
    p.Repair(generation=2, step=3, sends=[("state", 1)], receives=[("shard:1", 2, "ab")]),
    p.StoreSet(key="g2/a", value=b"\x00\xff"),
    p.Incident(record={"event": "fault", "rank": 1, "ms": 1.5, "list": [1, None]}),
    p.Beat(),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.integers(1, 200))
def test_any_cut_of_the_stream_gives_the_same_messages(messages: list[p.Message], size: int) -> None:
    writer, reader = framing.FrameWriter(), p.FrameReader()
    stream = b"".join(writer.frame(message) for message in messages)
    read = [message for at in range(0, len(stream), size) for message in reader.feed(stream[at : at + size])]
    assert read == messages


def test_a_prepared_message_is_the_message() -> None:
    writer, reader = framing.FrameWriter(), p.FrameReader()
    prepared = framing.prepare(MESSAGES[1])
    assert reader.feed(writer.frame(prepared) + writer.frame(prepared)) == [MESSAGES[1]] * 2


@given(st.sets(st.integers(0, 30)))
def test_members_as_spans(ranks: set[int]) -> None:
    spans = p.spans(sorted(ranks))
    assert p.Join(generation=1, spans=spans, step=0, prefix="").members == sorted(ranks)
    assert all(first > last + 1 for (_, last), (first, _) in zip(spans, spans[1:], strict=False))


def test_duplicates_are_dropped() -> None:
    reader = p.FrameReader()
    first, second = framing.encode(1, p.Beat()), framing.encode(2, p.Finished(step=1))
    assert reader.feed(first + first + second + first) == [p.Beat(), p.Finished(step=1)]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", framing.MAX_FRAME + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 5) + b"\x80\x04N.\x00",
        *(
            struct.pack(">I", len(body)) + body
            for body in (
                msgspec.msgpack.encode([1, {"type": "Nonsense"}]),
                msgspec.msgpack.encode([1, {"type": "Finished", "step": "many"}]),
                msgspec.msgpack.encode([1, {"type": "Finished"}]),
                msgspec.msgpack.encode({"type": "Finished", "step": 1}),
                msgspec.msgpack.encode([1, {"type": "Exit", "reason": "abc"}]).replace(b"abc", b"\xff\xc0a"),
            )
        ),
    ],
)
def test_what_is_not_the_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(framing.ProtocolError):
        p.FrameReader().feed(data)


@given(st.binary(max_size=200))
def test_noise_never_raises_anything_else(data: bytes) -> None:
    reader = p.FrameReader()
    try:
        for message in reader.feed(data):
            assert isinstance(message, p.Message)
    except framing.ProtocolError:
        pass


def test_a_message_that_is_too_big_is_not_sent() -> None:
    with pytest.raises(framing.ProtocolError, match="StoreSet"):
        framing.encode(1, p.StoreSet(key="k", value=bytes(framing.MAX_FRAME)))


def test_who_may_open_a_link() -> None:
    def hello(**changes: object) -> p.Hello:
        return msgspec.structs.replace(p.Hello(version=p.VERSION, token="secret", role="rank", rank=0), **changes)

    assert p.refusal(hello(), "secret") is None
    assert p.refusal(hello(role="agent"), "secret") is None
    for wrong, reason in (
        (hello(token="other"), "wrong job token"),
        (hello(version=99), "protocol version 99"),
        (hello(role="admin"), "unknown role"),
        (p.Beat(), "must be a Hello"),
    ):
        told = p.refusal(wrong, "secret")
        assert told is not None and reason in told and "secret" not in told
