"""The callback interface over TLS: who does not belong to the job is refused, and both sides say why."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from evertrain.mindio import tls
from evertrain.mindio.tft import link
from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.controller import Controller
from evertrain.mindio.tft.processor import Processor, Settings
from evertrain.mindio.tft.settings import Settings as ControllerSettings
from tests.certificates import Authority
from tests.mindio.strangers import strangers

TOKEN = "the-secret-of-this-job"


@pytest.fixture
def logged() -> Iterator[SimpleQueue[str]]:
    """What the controller writes, as it writes it: its thread may be behind what the peer has heard."""
    lines: SimpleQueue[str] = SimpleQueue()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.put(record.getMessage())

    logger, handler = logging.getLogger("evertrain.mindio.tft.accepted"), Lines()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_strangers_are_refused_in_words_on_both_sides(tmp_path: Path, logged: SimpleQueue[str]) -> None:
    authority = Authority(tmp_path)
    node = authority.issue()
    context = tls.server_context(node.info)
    controller = Controller(ControllerSettings(world_size=2, rank=-1), "127.0.0.1", context=context, token=TOKEN)
    controller.start()
    processor = Processor(
        Settings(rank=0, world_size=2, token=TOKEN, context=tls.client_context(node.info)), Callbacks()
    )
    try:
        processor.start(*controller.address)
        assert processor.set_replica([w.ReplicaGroup(rank_list=[0, 1], replica_cnt=2)])
        for stranger in strangers(authority, node, tmp_path):
            hello = w.Hello(version=w.VERSION, rank=1, token=stranger.token)
            with pytest.raises((link.NotWelcome, OSError)) as refused:
                link.connect(controller.address, hello, stranger.context, 5.0)
            said = str(refused.value)
            if isinstance(refused.value, ssl.SSLError):
                said = f"TLS: {tls.reason(refused.value)}"
            expected = "this controller speaks TLS" if stranger.context is None else stranger.hears
            assert expected in said, stranger.name
            while stranger.logged not in (line := logged.get(timeout=90)):
                assert line, stranger.name
            assert controller.linked == 1 and processor.running, stranger.name
    finally:
        processor.destroy()
        controller.destroy()
