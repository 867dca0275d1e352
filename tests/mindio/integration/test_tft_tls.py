"""Certificates and tokens between a real controller and real processors of the callback interface."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.mindio.tft import api_controller, api_framework, log, runtime
from mindio_ttp import framework_ttp as tft
from tests.certificates import DAY, Authority, Issued
from tests.mindio.jobs import until
from tests.ports import free_port


class GaveUp(Exception):
    pass


def _give_up(reason: str) -> None:
    raise GaveUp(reason)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))
    monkeypatch.setenv("TTP_RETRY_TIMES", "1")
    monkeypatch.setattr(api_framework, "give_up", _give_up)
    yield
    runtime.reset()
    tft.tft_destroy_controller()
    log.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def info(issued: Issued, password: str = "") -> str:
    ca = Path(issued.ca)
    parts = {"tlsCert": issued.cert, "tlsCaPath": str(ca.parent), "tlsCaFile": ca.name}
    parts["tlsPk"] = Path(issued.key).read_text()
    if password:
        parts["tlsPkPwd"] = password
    return ";".join(f"{key}: {value}" for key, value in parts.items())


def lead(tls_info: str | None) -> int:
    port = free_port()
    tft.tft_init_controller(-1, 1, False)
    tft.tft_start_controller("127.0.0.1", port, tls_info is not None, tls_info or "")
    return port


def follow(port: int, tls_info: str | None) -> None:
    tft.tft_init_processor(0, 1, False, tls_info is not None, tls_info or "")
    tft.tft_start_processor("127.0.0.1", port)


def test_both_sides_show_their_certificates(authority: Authority) -> None:
    tft.tft_register_decrypt_handler(lambda cipher: cipher[::-1])
    node = authority.issue(password="secret")
    port = lead(info(node, "terces"))
    follow(port, info(node, "terces"))
    assert api_controller.tft_query_high_availability_switch()
    group = {"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}
    tft.tft_set_optimizer_replica(0, [group])
    for step in range(1, 200):
        tft.tft_start_updating_os()
        tft.tft_end_updating_os(step)
    until(lambda: api_controller._controller.machine.roster.initialised(), "the report of the groups")


def test_a_certificate_that_soon_expires_is_told(authority: Authority, tmp_path: Path) -> None:
    lead(info(authority.issue("soon", ends=10 * DAY)))
    tft.tft_destroy_controller()
    (file,) = (tmp_path / "logs").iterdir()
    assert "soon.pem expires in 9 days" in file.read_text()


def test_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "other").issue()
    port = lead(info(authority.issue()))
    with pytest.raises(GaveUp, match="authority that we don't trust"):
        follow(port, info(stranger))


def test_tls_on_one_side_only(authority: Authority) -> None:
    node = authority.issue()
    port = lead(info(node))
    with pytest.raises(GaveUp, match="tft_start_processor"):
        follow(port, None)
    runtime.reset()
    tft.tft_destroy_controller()
    port = lead(None)
    with pytest.raises(GaveUp, match="tft_start_processor"):
        follow(port, info(node))


def test_a_wrong_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERTRAIN_TOKEN", "right")
    port = lead(None)
    monkeypatch.setenv("EVERTRAIN_TOKEN", "wrong")
    with pytest.raises(GaveUp, match="wrong job token"):
        follow(port, None)


def test_garbage_harms_neither_the_controller_nor_its_processors() -> None:
    port = lead(None)
    follow(port, None)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\xff" * 100)
        assert stranger.recv(100) == b""
    tft.tft_start_updating_os()
    tft.tft_end_updating_os(1)
    assert api_controller.tft_query_high_availability_switch()
