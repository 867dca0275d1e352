"""Labels of pods that related faults have hit: written until they stand, in order, however often the writing fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from evertrain.clusterd.labels import Labels
from evertrain.clusterd.model import Job, Pod
from evertrain.clusterd.recover.events import PatchPod
from tests import virtual_time

JOBS = [Job("U", "train", "default", pods={0: Pod(0, "a", "train-0"), 1: Pod(1, "b", "train-1")})]


class Server:
    """What pods are labelled with. It is away as long as `trouble` says something; `taken` lets an answer through."""

    def __init__(self) -> None:
        self.labels: dict[str, str | None] = {}
        self.writes = 0
        self.trouble = ""
        self.taken = asyncio.Event()
        self.taken.set()

    async def write(self, job: Job, patch: PatchPod) -> str:
        self.writes += 1
        await asyncio.sleep(0.1)
        if not self.trouble:
            self.labels[patch.uid] = patch.labels["fault-type"]
        await self.taken.wait()
        return self.trouble


def play(story: Any) -> None:
    async def told() -> None:
        server = Server()
        labels = Labels(server.write)
        running = asyncio.ensure_future(labels.run())
        try:
            await story(server, labels)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    test: Coroutine[Any, Any, None] = told()
    virtual_time.run(test)


def test_a_label_that_can_not_be_written_for_long_is_written_in_the_end():
    async def story(server: Server, labels: Labels) -> None:
        server.trouble = "no route"
        labels.want({"a": "Separate"}, JOBS)
        await asyncio.sleep(300)
        assert server.labels == {} and 10 < server.writes < 50
        server.trouble = ""
        await asyncio.sleep(30)
        assert server.labels == {"a": "Separate"}
        before = server.writes
        labels.want({"a": "Separate"}, JOBS)
        await asyncio.sleep(300)
        assert server.writes == before, "it stands"

    play(story)


def test_a_label_that_is_set_and_removed_at_once_does_not_stand_in_the_end():
    async def story(server: Server, labels: Labels) -> None:
        server.taken.clear()
        labels.want({"a": "Separate", "b": "SubHealth"}, JOBS)
        await asyncio.sleep(1)
        labels.want({"b": "Separate"}, JOBS)
        await asyncio.sleep(1)
        assert server.writes == 2, "one write of each pod at a time"
        server.taken.set()
        await asyncio.sleep(1)
        assert server.labels == {"a": None, "b": "Separate"}

    play(story)


def test_what_was_perhaps_written_is_removed_when_it_is_no_longer_wanted():
    async def story(server: Server, labels: Labels) -> None:
        server.labels["a"] = "Separate"  # the answer got lost
        server.trouble = "no answer"
        labels.want({"a": "Separate"}, JOBS)
        await asyncio.sleep(1)
        labels.want({}, JOBS)
        server.trouble = ""
        await asyncio.sleep(30)
        assert server.labels == {"a": None}

    play(story)


def test_what_one_before_us_has_written_is_removed_and_pods_that_are_gone_are_forgotten():
    async def story(server: Server, labels: Labels) -> None:
        server.trouble = "no route"
        labels.found("a", "SubHealth")
        labels.want({"gone": "Separate"}, JOBS)
        await asyncio.sleep(100)
        labels.want({}, [])
        await asyncio.sleep(100)
        before = server.writes
        await asyncio.sleep(100)
        assert server.writes == before
        labels.found("b", "SubHealth")
        server.trouble = ""
        labels.want({}, JOBS)
        await asyncio.sleep(1)
        assert server.labels == {"b": None}

    play(story)
