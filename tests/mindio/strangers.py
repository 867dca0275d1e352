"""Everybody who has no business on a link with TLS, and the words that both sides must find for each."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evertrain.mindio import tls
from tests.certificates import DAY, Authority, Issued, careless


@dataclass
class Stranger:
    name: str
    context: ssl.SSLContext | None
    """None: plain text."""
    hears: str
    """Of the error that it gets."""
    logged: str
    """Of the line that the controller writes."""
    token: str = "0" * 32


def strangers(authority: Authority, node: Issued, folder: Path) -> Iterator[Stranger]:
    elsewhere = Authority(folder, "elsewhere").issue("stranger")
    expired = authority.issue("expired", begins=-9 * DAY, ends=-DAY)
    yield Stranger(
        "certificate of another authority",
        careless(node.ca, elsewhere),
        "TLS: the peer does not know the authority that signed our certificate",
        "TLS: the peer's certificate is refused: it is of an authority that we don't trust",
    )
    yield Stranger(
        "trusts another authority",
        tls.client_context(elsewhere.info),
        "TLS: the peer's certificate is refused: it is of an authority that we don't trust",
        "TLS: the peer does not know the authority that signed our certificate",
    )
    yield Stranger(
        "expired certificate",
        careless(node.ca, expired),
        "TLS: the peer says that our certificate has expired",
        "TLS: the peer's certificate is refused: certificate has expired",
    )
    yield Stranger(
        "no certificate",
        careless(node.ca, None),
        "TLS: the peer demands a certificate and we have shown none",
        "TLS: the peer has shown no certificate",
    )
    yield Stranger(
        "plain text",
        None,
        "this controller speaks TLS: give it certificates",
        "it speaks plain text, and this controller TLS",
    )
    yield Stranger("no token", tls.client_context(node.info), "wrong job token", "wrong job token")
