"""Why groups are not moved to another link, without any link."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from evertrain.torch import failover, groups


def group(library: str = "gloo", moves: int = 0) -> Any:
    return SimpleNamespace(backend=SimpleNamespace(name=library), moves=moves)


def test_only_what_can_change_its_link_is_asked_to() -> None:
    assert failover._why_not([group(), group(moves=groups.MOST_MOVES - 1)]) == ""
    assert "nccl: only gloo can" in failover._why_not([group(), group("nccl")])
    assert f"more than {groups.MOST_MOVES} times" in failover._why_not([group(moves=groups.MOST_MOVES)])


def agree(store: dist.Store, rank: int, reason: str = "", *, ended: bool = False) -> None:
    failover._agree(store, "ready", 2, rank, reason, lambda: ended)


def test_a_rank_whose_pause_ends_before_all_have_come_keeps_all_where_they_are() -> None:
    store = dist.HashStore()
    with pytest.raises(failover.LinkError, match="rank 0: the pause has ended"):
        agree(store, 0, ended=True)
    with pytest.raises(failover.LinkError, match="rank 0: the pause has ended"):
        agree(store, 1)


def test_a_rank_that_never_comes_keeps_all_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "LIMIT", 0.01)
    with pytest.raises(failover.LinkError, match="not all ranks were there within 0.01 s"):
        agree(dist.HashStore(), 0)


def test_one_that_can_not_is_enough_and_all_hear_why() -> None:
    store = dist.HashStore()
    for rank, reason in ((1, "eth1 is down"), (0, "")):
        with pytest.raises(failover.LinkError, match="rank 1: eth1 is down"):
            agree(store, rank, reason)
