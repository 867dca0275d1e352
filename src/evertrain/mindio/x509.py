"""What has to be known of a certificate before it is used: until when it is valid, and how strong its key is.

The ssl module tells neither of a certificate that is not a CA's; so the few fields are read here. Nothing is verified
in this module: OpenSSL does that during the handshake.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_RSA = bytes.fromhex("2a864886f70d010101")
_RSA_PSS = bytes.fromhex("2a864886f70d01010a")
_EC = bytes.fromhex("2a8648ce3d0201")
_EDWARDS = {bytes.fromhex("2b6570"): 256, bytes.fromhex("2b6571"): 456}
_COMMON_NAME = bytes.fromhex("550403")
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)


class FormatError(ValueError):
    """This is no certificate or revocation list."""


@dataclass(frozen=True, slots=True)
class Certificate:
    name: str
    """The subject's common name; empty if it has none."""
    begins: datetime
    ends: datetime
    key: str
    """RSA, EC or other."""
    bits: int


@dataclass(frozen=True, slots=True)
class RevocationList:
    begins: datetime
    ends: datetime | None


def certificates(text: str) -> list[Certificate]:
    """All certificates of a PEM file, in their order."""
    return [_certificate(der) for label, der in _blocks(text) if label.endswith("CERTIFICATE")]


def revocation_lists(text: str) -> list[RevocationList]:
    return [_revocation_list(der) for label, der in _blocks(text) if label == "X509 CRL"]


def _blocks(text: str) -> Iterator[tuple[str, bytes]]:
    for label, body in _PEM.findall(text):
        try:
            yield label, base64.b64decode("".join(body.split()), validate=True)
        except ValueError:
            if label.endswith(("CERTIFICATE", "CRL")):
                raise FormatError(f"the text of a {label} is not base64") from None


def _certificate(der: bytes) -> Certificate:
    try:
        ((_, outer),) = _elements(der)
        fields = list(_elements(next(_elements(outer))[1]))
        if fields[0][0] == 0xA0:  # the version, which old certificates leave out
            del fields[0]
        begins, ends = (_time(*element) for element in _elements(fields[3][1]))
        key, bits = _key(fields[5][1])
        return Certificate(_common_name(fields[4][1]), begins, ends, key, bits)
    except (IndexError, ValueError, StopIteration):
        raise FormatError("it is damaged") from None


def _revocation_list(der: bytes) -> RevocationList:
    try:
        ((_, outer),) = _elements(der)
        times = [_time(*element) for element in _elements(next(_elements(outer))[1]) if element[0] in _TIMES]
        return RevocationList(times[0], times[1] if len(times) > 1 else None)
    except (IndexError, ValueError, StopIteration):
        raise FormatError("it is damaged") from None


def _key(info: bytes) -> tuple[str, int]:
    (_, algorithm), (_, material) = _elements(info)
    kind = next(_elements(algorithm))[1]
    material = material[1:]  # a bit string begins with the number of its unused bits
    if kind in (_RSA, _RSA_PSS):
        modulus = next(_elements(next(_elements(material))[1]))[1]
        return "RSA", int.from_bytes(modulus, "big").bit_length()
    if kind == _EC:
        compressed = material[0] in (2, 3)
        return "EC", (len(material) - 1) * 8 // (1 if compressed else 2)
    return ("EC", _EDWARDS[kind]) if kind in _EDWARDS else ("other", 0)


def _common_name(name: bytes) -> str:
    for _, part in _elements(name):
        for _, pair in _elements(part):
            (_, kind), (_, value) = _elements(pair)
            if kind == _COMMON_NAME:
                return value.decode("utf-8", "replace")
    return ""


_TIMES = (_UTC_TIME, _GENERALIZED_TIME)


def _time(tag: int, value: bytes) -> datetime:
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        # Two digits of the year, from 1950 to 2049.
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and contents that follow each other in this piece of DER."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length >= 0x80:
            digits = length & 0x7F
            length, at = int.from_bytes(data[at : at + digits], "big"), at + digits
        if at + length > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + length]
        at += length
