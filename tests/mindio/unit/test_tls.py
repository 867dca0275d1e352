"""Certificates: what is read of them, what is refused with which words, and TLS over memory and over sockets."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from evertrain.mindio import tls, x509
from evertrain.mindio.tls_stream import HandshakeError, TlsSocket, TlsStream
from tests.certificates import DAY, Authority, Issued


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def node(authority: Authority) -> Issued:
    return authority.issue()


def shake(client: TlsStream, server: TlsStream) -> None:
    """Carry bytes between the two until both have nothing more to say."""
    client.start()
    while to_server := client.take():
        server.feed(to_server)
        if to_client := server.take():
            client.feed(to_client)


def pair(client: tls.TlsInfo, server: tls.TlsInfo) -> tuple[TlsStream, TlsStream]:
    return TlsStream(tls.client_context(client), False), TlsStream(tls.server_context(server), True)


def info_text(node: Issued, key: str | None = None, **more: str) -> str:
    ca = Path(node.ca)
    values = {
        "tlsCert": node.cert,
        "tlsCaPath": str(ca.parent),
        "tlsCaFile": ca.name,
        "tlsPk": Path(node.key).read_text() if key is None else key,
        **more,
    }
    return ";".join(f"{name}: {value}" for name, value in values.items()) + ";"


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "key", "bits"), [("ec256", "EC", 256), ("ec224", "EC", 224), ("rsa3072", "RSA", 3072)]
)
def test_what_is_read_of_a_certificate(authority: Authority, kind: str, key: str, bits: int) -> None:
    issued = authority.issue(kind, kind, ends=40 * 365 * DAY)  # past 2050, where the format of times changes
    (found,) = x509.certificates(Path(issued.cert).read_text())
    assert (found.name, found.key, found.bits) == (kind, key, bits)
    assert abs(found.ends - datetime.now(timezone.utc) - 40 * 365 * DAY) < timedelta(minutes=5)


@pytest.mark.parametrize("body", ["", "MII=", "AAAA", "MIIC", "////", "§"])
def test_a_damaged_certificate_is_told_from_a_good_one(body: str) -> None:
    with pytest.raises(x509.FormatError):
        x509.certificates(f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----")


def test_the_string_of_the_callback_interface(node: Issued, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        info = tls.parse_tls_info(
            info_text(
                node, tlsCaFile="a.pem, b.pem", tlsCrlPath="/crl", tlsCrlFile="x.crl", tlsPkPwd="p:w", tlsColour="no"
            )
        )
    folder = os.path.dirname(node.ca)
    assert info.ca == (f"{folder}/a.pem", f"{folder}/b.pem") and info.crl == ("/crl/x.crl",)
    assert info.password == "p:w" and info.key == Path(node.key).read_text().strip()
    assert "tlsColour" in caplog.text
    assert "PRIVATE" not in repr(info) + caplog.text and "p:w" not in repr(info) + caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "tlsCert, tlsCaPath, tlsCaFile, tlsPk missing"),
        ("tlsCert: a; tlsCaPath: b; tlsCaFile: c", "tlsPk missing"),
        ("just words", "key: value"),
        ("tlsCert: " + "x" * 20_000, "10240 bytes"),
    ],
)
def test_a_string_that_is_no_tls_info(text: str, words: str) -> None:
    with pytest.raises(tls.TlsError, match=words):
        tls.parse_tls_info(text)


# --- contexts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ec256", "rsa3072"])
def test_both_sides_talk(authority: Authority, kind: str) -> None:
    issued = authority.issue(f"good-{kind}", kind)
    client, server = pair(issued.info, tls.parse_tls_info(info_text(issued)))
    client.write(b"early")
    client.start()
    server.feed(client.take())
    client.feed(server.take())
    assert server.feed(client.take()) == b"early"
    assert client.established and server.established
    assert server._tls.version() == "TLSv1.3" and server._tls.getpeercert()
    server.write(b"x" * 100_000)
    assert client.feed(server.take()) == b"x" * 100_000
    client.close()
    server.feed(client.take())
    assert server.closed


def test_a_key_with_a_password(authority: Authority) -> None:
    issued = authority.issue("locked", password="open sesame")
    text = info_text(issued, tlsPkPwd="emases nepo")
    tls.server_context(tls.parse_tls_info(text), decrypt=lambda cipher: cipher[::-1])
    with pytest.raises(tls.TlsError, match="password is wrong"):
        tls.server_context(tls.parse_tls_info(text))
    with pytest.raises(tls.TlsError, match="encrypted and no password"):
        tls.client_context(issued.info)


def test_the_key_leaves_no_trace_in_files(node: Issued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    tls.server_context(tls.parse_tls_info(info_text(node)))
    assert not list(tmp_path.iterdir()) and set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("expired", {"begins": -9 * DAY, "ends": -2 * DAY}, "expired.pem has expired: it was valid until 20"),
        ("unborn", {"begins": 2 * DAY}, "unborn.pem is not valid before 20"),
        ("weak-rsa", {"key": "rsa2048"}, "the RSA key has 2048 bits; at least 3072"),
        ("weak-ec", {"key": "ec224"}, "the EC key has 224 bits; at least 256"),
    ],
)
def test_certificates_that_are_refused_when_loaded(authority: Authority, name: str, options: dict, words: str) -> None:
    issued = authority.issue(name, **options)
    with pytest.raises(tls.TlsError, match=words):
        tls.client_context(issued.info)


def test_files_that_can_not_be_used(authority: Authority, node: Issued, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    info = node.info
    for changed, words in (
        ({"cert": str(tmp_path / "none.pem")}, "certificate .*none.pem can't be read: No such file"),
        ({"cert": str(empty)}, "empty.pem contains no certificate"),
        ({"ca": (str(empty),)}, "empty.pem contains no certificate"),
        ({"ca": ()}, "no certificate of an authority"),
        ({"key_file": str(empty)}, "empty.pem can't be used"),
        ({"key_file": authority.issue("other").key}, "is not the key of"),
        ({"crl": (str(empty),)}, "empty.pem contains no revocation list"),
        ({"crl": (authority.revoke(ends=-DAY),)}, "ca.crl has expired"),
    ):
        with pytest.raises(tls.TlsError, match=words):
            tls.server_context(dataclasses.replace(info, **changed))


# --- who is refused --------------------------------------------------------------------------------------------------


def test_a_stranger_is_refused_by_both_sides(node: Issued, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "elsewhere").issue()
    with pytest.raises(HandshakeError, match="it is of an authority that we don't trust"):
        shake(*pair(stranger.info, node.info))
    believing = dataclasses.replace(stranger.info, ca=(node.ca,))
    client, server = pair(believing, node.info)
    with pytest.raises(HandshakeError, match="certificate is refused") as refused:
        shake(client, server)
    with pytest.raises(HandshakeError, match="does not know the authority"):
        client.feed(refused.value.last_words)


def test_a_weak_peer_is_refused(authority: Authority, node: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    weak = authority.issue("weak-peer", "rsa2048")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(weak.cert, weak.key)
    with pytest.raises(HandshakeError, match="key too weak"):
        shake(TlsStream(context, False), TlsStream(tls.server_context(node.info), True))


def test_a_revoked_certificate_is_refused(authority: Authority, node: Issued) -> None:
    revoked = authority.issue("revoked")
    strict = dataclasses.replace(node.info, crl=(authority.revoke(revoked.serial),))
    shake(*pair(node.info, strict))
    with pytest.raises(HandshakeError, match="certificate revoked"):
        shake(*pair(revoked.info, strict))


def test_no_certificate_and_old_versions_are_refused(node: Issued) -> None:
    naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    naked.load_verify_locations(node.ca)
    naked.check_hostname = False
    client = TlsStream(naked, False)
    with pytest.raises(HandshakeError, match="shown no certificate") as refused:
        shake(client, TlsStream(tls.server_context(node.info), True))
    with pytest.raises(HandshakeError, match="demands a certificate"):
        client.feed(refused.value.last_words)
    naked.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(HandshakeError, match="older TLS"):
        shake(TlsStream(naked, False), TlsStream(tls.server_context(node.info), True))


# --- dates of a running job ------------------------------------------------------------------------------------------


def test_a_certificate_near_its_end_is_announced(authority: Authority, node: Issued) -> None:
    soon = authority.issue("soon", ends=10 * DAY)
    now = datetime.now(timezone.utc)
    (warning,) = tls.expiring(soon.info, now, 30 * DAY)
    assert "soon.pem expires in 9 days" in warning
    assert not tls.expiring(soon.info, now, 7 * DAY)
    assert "has expired; new links will be refused" in tls.expiring(soon.info, now + 11 * DAY, 7 * DAY)[0]


@pytest.mark.parametrize(
    ("hours", "days", "expected"),
    [
        (None, None, (168, 30)),
        ("24", "7", (24, 7)),
        ("23", "181", (168, 30)),
        ("x", "-1", (168, 30)),
        ("720", "7", (168, 30)),
    ],
)
def test_when_to_look(hours: str | None, days: str | None, expected: tuple[int, int]) -> None:
    given = {"TTP_ACCLINK_CHECK_PERIOD_HOURS": hours, "TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS": days}
    lookout = tls.Lookout.from_environment({name: value for name, value in given.items() if value is not None})
    assert (lookout.period, lookout.ahead) == (timedelta(hours=expected[0]), timedelta(days=expected[1]))


# --- on a socket -----------------------------------------------------------------------------------------------------


def test_a_socket_is_read_and_written_at_once(node: Issued) -> None:
    """The reader is inside `recv` all the time while two other threads write."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(20)
    with ThreadPoolExecutor() as pool, ours, theirs:
        server = pool.submit(TlsSocket, theirs, tls.server_context(node.info), True)
        client = TlsSocket(ours, tls.client_context(node.info))
        answered = server.result()
        count, size = 200, 4000
        received = [0, 0]

        def read(which: int, end: TlsSocket) -> None:
            while received[which] < 2 * count * size:
                data = end.recv(65536)
                assert data.strip(b"ab") == b""
                received[which] += len(data)

        def write(end: TlsSocket, letter: bytes) -> None:
            for _ in range(count):
                end.sendall(letter * size)

        jobs = [pool.submit(read, which, end) for which, end in enumerate((client, answered))]
        jobs += [pool.submit(write, end, letter) for end in (client, answered) for letter in (b"a", b"b")]
        for job in jobs:
            job.result(20)
        assert threading.active_count() < 50 and received == [2 * count * size] * 2


def test_a_socket_says_why_it_was_refused(node: Issued, tmp_path: Path) -> None:
    stranger = dataclasses.replace(Authority(tmp_path, "elsewhere").issue().info, ca=(node.ca,))
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(20)
    with ThreadPoolExecutor() as pool, ours, theirs:
        server = pool.submit(TlsSocket, theirs, tls.server_context(node.info), True)
        client = TlsSocket(ours, tls.client_context(stranger))  # in TLS 1.3 the client is done before it is judged
        with pytest.raises(ConnectionError, match="certificate is refused"):
            server.result()
        with pytest.raises(ConnectionError, match="does not know the authority"):
            client.recv(100)
