"""Certificates for tests: an authority and what it signs, good or bad in one way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT, SSLContext

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID

from evertrain.mindio.tls import TlsInfo

DAY = timedelta(days=1)


def new_key(kind: str = "ec256") -> CertificateIssuerPrivateKeyTypes:
    if kind.startswith("rsa"):
        return _rsa(int(kind[3:]))
    return ec.generate_private_key({"ec256": ec.SECP256R1(), "ec224": ec.SECP224R1()}[kind])


@functools.cache
def _rsa(bits: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


def _pem(key: CertificateIssuerPrivateKeyTypes, password: str = "") -> bytes:
    how: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        how = serialization.BestAvailableEncryption(password.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@dataclass
class Issued:
    cert: str
    key: str
    ca: str
    serial: int

    @property
    def info(self) -> TlsInfo:
        return TlsInfo.from_files(self.cert, self.key, self.ca)

    @property
    def flags(self) -> list[str]:
        return [f"--ft-tls-cert={self.cert}", f"--ft-tls-key={self.key}", f"--ft-tls-ca={self.ca}"]


def careless(ca: str, issued: Issued | None) -> SSLContext:
    """What a client has that does not look at its own certificate, or has none."""
    context = SSLContext(PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ca)
    if issued is not None:
        context.load_cert_chain(issued.cert, issued.key)
    return context


class Authority:
    def __init__(self, folder: Path, name: str = "ca", key: str = "ec256") -> None:
        self.folder, self.name = folder, name
        self._key = new_key(key)
        self.certificate = self._sign(name, self._key, ca=True)
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self,
        name: str,
        key: CertificateIssuerPrivateKeyTypes,
        *,
        ca: bool = False,
        begins: timedelta = -DAY,
        ends: timedelta = 365 * DAY,
        hosts: Sequence[str] = (),
    ) -> x509.Certificate:
        now = datetime.now(timezone.utc)
        names = x509.SubjectAlternativeName([_general(host) for host in hosts])
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        return (builder.add_extension(names, critical=False) if hosts else builder).sign(self._key, hashes.SHA256())

    def issue(
        self,
        name: str = "node",
        key: str = "ec256",
        *,
        password: str = "",
        begins: timedelta = -DAY,
        ends: timedelta = 365 * DAY,
        hosts: Sequence[str] = (),
    ) -> Issued:
        """`hosts`: names and addresses of a server."""
        private = new_key(key)
        certificate = self._sign(name, private, begins=begins, ends=ends, hosts=hosts)
        cert_file, key_file = self.folder / f"{self.name}-{name}.pem", self.folder / f"{self.name}-{name}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(_pem(private, password))
        key_file.chmod(0o600)
        return Issued(str(cert_file), str(key_file), self.file, certificate.serial_number)

    def revoke(self, *serials: int, ends: timedelta = 30 * DAY) -> str:
        """A revocation list with these certificates on it."""
        now = datetime.now(timezone.utc)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(_name(self.name))
            .last_update(now - 2 * DAY)
            .next_update(now + ends)
        )
        for serial in serials:
            revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - DAY).build()
            builder = builder.add_revoked_certificate(revoked)
        file = self.folder / f"{self.name}.crl"
        file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return str(file)
