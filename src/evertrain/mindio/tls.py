"""TLS for the links between controller, agents and processors.

TLS 1.3 only, both sides show a certificate of the same authority, and nothing weaker than 128 bits. Host names are not
compared: ranks move between machines, and whoever holds a certificate of the job's authority belongs to the job; the
job token is checked besides.

A mistake in the files would show as a failed handshake with three words of OpenSSL's. So they are looked at when they
are loaded, and the error names the file and what is wrong with it. A private key is never logged, never part of a
`repr`, and never in a file of ours: OpenSSL wants a path, and gets one to memory of this process.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

from evertrain.mindio import x509

log = logging.getLogger(__name__)

Decrypt = Callable[[str], str]
_T = TypeVar("_T")

MAX_INFO = 10 * 1024
VARIABLES = ("EVERTRAIN_TLS_CERT", "EVERTRAIN_TLS_KEY", "EVERTRAIN_TLS_CA")
LEAST_BITS = {"RSA": 3072, "EC": 256}
# Level 3 of OpenSSL is 128 bits: it refuses RSA keys below 3072 bits also in what the peer shows.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=3"
_KEYS = ("tlsCert", "tlsCaPath", "tlsCaFile", "tlsCrlPath", "tlsCrlFile", "tlsPk", "tlsPkPwd", "packagePath")


class TlsError(ValueError):
    """The certificates can't be used; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class TlsInfo:
    """Where the certificates are. The private key is either text or a file."""

    cert: str
    ca: tuple[str, ...]
    crl: tuple[str, ...] = ()
    key: str = field(default="", repr=False)
    key_file: str = ""
    password: str = field(default="", repr=False)
    """As given: a decrypt handler, if there is one, turns it into the real one."""
    package_path: str = ""
    """Where the original finds its OpenSSL; Python brings its own."""

    @classmethod
    def from_files(cls, cert: str, key: str, ca: str) -> TlsInfo:
        return cls(cert=os.path.abspath(cert), ca=(os.path.abspath(ca),), key_file=os.path.abspath(key))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TlsInfo | None:
        """What a launcher has handed to its processes; None if the job has no certificates."""
        cert, key, ca = (environ.get(name, "") for name in VARIABLES)
        return cls.from_files(cert, key, ca) if cert and key and ca else None

    def environment(self) -> dict[str, str]:
        """The opposite way. Only names of files travel like this."""
        return dict(zip(VARIABLES, (self.cert, self.key_file, self.ca[0]), strict=True))


def parse_tls_info(text: str) -> TlsInfo:
    """Read the string of `tft_start_controller` and `tft_init_processor`: `key: value` items separated by `;`."""
    if len(text.encode()) > MAX_INFO:
        raise TlsError(f"tls_info has more than {MAX_INFO} bytes")
    values: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, value = item.partition(":")
        name = name.strip()
        if not colon:
            raise TlsError("tls_info: expected `key: value` items separated by `;`, and one has no `:`")
        if name in _KEYS:
            values[name] = value.strip()
        elif name.isidentifier():
            log.warning("tls_info: there is no key called %r; there are %s", name, ", ".join(_KEYS))
        else:
            log.warning("tls_info: an item is not understood and left out; the keys are %s", ", ".join(_KEYS))
    missing = [name for name in ("tlsCert", "tlsCaPath", "tlsCaFile", "tlsPk") if not values.get(name)]
    if missing:
        raise TlsError(f"tls_info: {', '.join(missing)} missing")
    return TlsInfo(
        cert=values["tlsCert"],
        ca=_files(values["tlsCaPath"], values["tlsCaFile"]),
        crl=_files(values.get("tlsCrlPath", ""), values.get("tlsCrlFile", "")),
        key=_key_text(values["tlsPk"]),
        password=values.get("tlsPkPwd", ""),
        package_path=values.get("packagePath", ""),
    )


def _files(folder: str, names: str) -> tuple[str, ...]:
    return tuple(os.path.join(folder, name.strip()) for name in names.split(",") if name.strip())


def _key_text(text: str) -> str:
    """A key that came through an environment variable or YAML may have its line ends written out."""
    return text.replace("\\n", "\n") if "\n" not in text else text


def server_context(info: TlsInfo, decrypt: Decrypt | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    # A link is opened once and stays; tickets would be two more packets for each of ten thousand.
    context.num_tickets = 0
    _fill(context, info, decrypt)
    return context


def client_context(info: TlsInfo, decrypt: Decrypt | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    _fill(context, info, decrypt)
    return context


def _fill(context: ssl.SSLContext, info: TlsInfo, decrypt: Decrypt | None) -> None:
    check(info, datetime.now(timezone.utc))
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.set_ciphers(_CIPHERS)
    for path in (*info.ca, *info.crl):
        try:
            context.load_verify_locations(path)
        except ssl.SSLError as error:
            raise TlsError(f"{path} can't be used: {reason(error)}") from None
    if info.crl:
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    _load_key(context, info, decrypt)


def _load_key(context: ssl.SSLContext, info: TlsInfo, decrypt: Decrypt | None) -> None:
    text = info.key or _read(info.key_file, "private key")
    password = info.password
    if password and decrypt is not None:
        password = decrypt(password)
    asked = False

    def give_password() -> str:
        # Without this OpenSSL would ask at the terminal, and wait.
        nonlocal asked
        asked = True
        return password

    fd = os.memfd_create("evertrain-key", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(text.encode())
        context.load_cert_chain(info.cert, f"/proc/self/fd/{fd}", give_password)
    except (ssl.SSLError, ValueError) as error:
        which = info.key_file or "the private key"
        code = error.reason if isinstance(error, ssl.SSLError) else ""
        if code == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{which} is not the key of {info.cert}") from None
        if asked:
            how = "its password is wrong" if password else "it is encrypted and no password was given"
            raise TlsError(f"{which} can't be used: {how}") from None
        raise TlsError(f"{which} can't be used with {info.cert}: {reason(error)}") from None
    finally:
        os.close(fd)


# --- looking at the files --------------------------------------------------------------------------------------------


def check(info: TlsInfo, now: datetime) -> None:
    """Raise if a file can't be read, is not what it should be, is not valid at this time or is too weak."""
    if not info.ca:
        raise TlsError("no certificate of an authority was given")
    for path, found in _certificates(info):
        for certificate in found:
            _check_time(path, certificate.begins, certificate.ends, now)
        # Chains may hold a root that nobody uses; OpenSSL judges what is used.
        first = found[0]
        least = LEAST_BITS.get(first.key)
        if least is None:
            raise TlsError(f"{path}: only RSA and EC keys are supported")
        if first.bits < least:
            raise TlsError(f"{path}: the {first.key} key has {first.bits} bits; at least {least} are needed")
    for path in info.crl:
        lists = _parse(path, x509.revocation_lists, "revocation list")
        for each in lists:
            _check_time(path, each.begins, each.ends, now)


def _check_time(path: str, begins: datetime, ends: datetime | None, now: datetime) -> None:
    if now < begins:
        raise TlsError(f"{path} is not valid before {_show(begins)}; it is {_show(now)} here")
    if ends is not None and now > ends:
        raise TlsError(f"{path} has expired: it was valid until {_show(ends)}")


def expiring(info: TlsInfo, now: datetime, ahead: timedelta) -> list[str]:
    """What to warn of: each file whose end is nearer than `ahead`, or past."""
    warnings = []
    for path, found in _certificates(info):
        ends = min(certificate.ends for certificate in found)
        if ends - now <= ahead:
            left = (ends - now).days
            when = f"expires in {left} days" if left >= 0 else "has expired; new links will be refused"
            warnings.append(f"{path} {when} ({_show(ends)})")
    return warnings


def _certificates(info: TlsInfo) -> list[tuple[str, list[x509.Certificate]]]:
    return [(path, _parse(path, x509.certificates, "certificate")) for path in (info.cert, *info.ca)]


def _parse(path: str, parse: Callable[[str], Sequence[_T]], what: str) -> list[_T]:
    try:
        found = list(parse(_read(path, what)))
    except x509.FormatError as error:
        raise TlsError(f"{path} can't be used: {error}") from None
    if not found:
        raise TlsError(f"{path} contains no {what} (PEM is expected)")
    return found


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError as error:
        raise TlsError(f"the {what} {path} can't be read: {error.strerror}") from None


def _show(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC")


# --- how often to look at the dates of a running job -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lookout:
    """How often certificates are looked at, and how long before their end that is worth a warning."""

    period: timedelta = timedelta(hours=168)
    ahead: timedelta = timedelta(days=30)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Lookout:
        """A value that is no number or out of range counts as not given, as in the original."""
        hours = _number(environ.get("TTP_ACCLINK_CHECK_PERIOD_HOURS"), 24, 720, 168)
        days = _number(environ.get("TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS"), 7, 180, 30)
        if days * 24 < hours:
            hours, days = 168, 30
        return cls(timedelta(hours=hours), timedelta(days=days))


def _number(text: str | None, low: int, high: int, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and low <= int(text) <= high else default


# --- failed handshakes in words --------------------------------------------------------------------------------------

_REASONS = {
    "TLSV1_ALERT_UNKNOWN_CA": "the peer does not know the authority that signed our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the peer says that our certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the peer says that our certificate has been revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer does not accept our certificate",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the peer does not accept our certificate or offers nothing that we speak",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer demands a certificate and we have shown none",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer has shown no certificate",
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS",
    "HTTP_REQUEST": "the peer speaks HTTP",
    "UNSUPPORTED_PROTOCOL": "the peer speaks an older TLS than 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer does not speak TLS 1.3",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it contains no certificate",
}


_UNTRUSTED = (18, 19, 20, 21)
"""OpenSSL tells apart where the chain ended."""


def reason(error: Exception) -> str:
    """Why a handshake failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = "it is of an authority that we don't trust" if error.verify_code in _UNTRUSTED else error.verify_message
        return f"the peer's certificate is refused: {why}"
    if isinstance(error, ssl.SSLEOFError):
        return "the peer broke off the TLS handshake"
    if isinstance(error, ssl.SSLError):
        code = error.reason or ""
        return _REASONS.get(code, code.replace("_", " ").lower() or str(error))
    return str(error)
