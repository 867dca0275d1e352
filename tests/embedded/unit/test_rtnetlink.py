"""What is asked of the kernel, in its own words, where no kernel at hand can be asked."""

from __future__ import annotations

import struct

import pytest

from evertrain.embedded.network.rtnetlink import Rtnetlink


def test_delay_and_loss_in_the_words_of_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in pkt_sched.h: struct tcmsg, TCA_KIND, TCA_OPTIONS with struct tc_netem_qopt and TCA_NETEM_LATENCY64."""
    asked: list[tuple[int, int, bytes]] = []
    monkeypatch.setattr(Rtnetlink, "index", lambda self, name: 7)
    monkeypatch.setattr(Rtnetlink, "_ask", lambda self, *order: asked.append(order) or [])
    link = Rtnetlink()
    link.worsen("nic0", 0.05, 0.25)
    link.worsen_no_more("nic0")
    link.close()
    root = struct.pack("=BBHiIII", 0, 0, 0, 7, 0, 0xFFFFFFFF, 0)
    ticks = 50_000_000 // 64  # a tick is 64 ns: the second number of /proc/net/psched
    options = struct.pack("=IIIIII", ticks, 100_000, 0x3FFFFFFF + 1, 0, 0, 0) + struct.pack("=HHq", 12, 10, 50_000_000)
    kind = struct.pack("=HH6sxx", 10, 1, b"netem\0")
    assert asked == [
        (36, 0x4 | 0x400 | 0x100, root + kind + struct.pack("=HH", 4 + len(options), 2) + options),
        (37, 0x4, root),
    ]
