"""Registrations with the Job service, without a port."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.clusterd.services import job
from evertrain.clusterd.services.access import Security
from evertrain.wire import job_pb2
from tests.clusterd.services import MemoryHub, a_summary


async def test_registrations_that_nobody_uses_make_room_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.MOST_CLIENTS == 100_000
    monkeypatch.setattr(job, "MOST_CLIENTS", 3)
    now = 0.0
    servicer = job.Job(MemoryHub(), Security(insecure=True), clock=lambda: now)

    async def register() -> Any:
        return await servicer.Register(job_pb2.ClientInfo(role="CCAgent"), None)

    assert [(await register()).code for _ in range(4)] == [200, 200, 200, 429]
    now = 599.0
    assert (await register()).code == 429
    now = 601.0
    assert [(await register()).code for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.parametrize("size", [10, 800, 5_000])
def test_lists_of_many_jobs_are_messages_that_every_client_takes(size: int) -> None:
    """4 MiB, if the client asks for nothing else."""
    summaries = [a_summary(f"job-{number}", chips=1, hccl="x" * size) for number in range((9 << 20) // (size + 150))]
    batches = list(job.batches(summaries))
    assert [each.jobId for batch in batches for each in batch] == [each.uid for each in summaries]
    sizes = [job._list(batch, len(summaries)).ByteSize() for batch in batches]
    assert max(sizes) <= 4 << 20 and min(sizes[:-1]) > 3 << 20
