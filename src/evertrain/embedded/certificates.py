"""Who is who on the embedded cluster: a certificate authority, the server's certificate, the token, the kubeconfig."""

from __future__ import annotations

import base64
import ipaddress
import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID_DAYS = 3650
_RENEW_DAYS = 30
_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True)
class Credentials:
    """Files of the server; `token` is what a client must present."""

    authority: Path
    certificate: Path
    key: Path
    token: str


def credentials(folder: Path, *hosts: str) -> Credentials:
    """Those in the folder, made where they are missing or about to expire. Clients of an earlier start keep working."""
    hosts = hosts or ("127.0.0.1",)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_file = folder / "token"
    token = token_file.read_text().strip() if token_file.exists() else ""
    if not token:  # an empty one would let everybody in
        token = secrets.token_urlsafe(32)
        write_private(token_file, token.encode())
    authority, authority_key = folder / "ca.crt", folder / "ca.key"
    certificate, key = folder / "server.crt", folder / "server.key"
    if not (_usable(authority) and authority_key.exists()):
        # In this order: whoever is killed in between must not leave a certificate of another authority.
        certificate.unlink(missing_ok=True)
        _make_authority(authority, authority_key)
    if not (all(_usable(certificate, host) for host in hosts) and key.exists()):
        _make_certificate(certificate, key, authority, authority_key, hosts)
    return Credentials(authority, certificate, key, token)


def write_kubeconfig(path: Path, url: str, credentials: Credentials, *, name: str = "evertrain") -> None:
    """For kubectl and every other client. Only the owner may read it: it holds the token."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": name,
                "cluster": {
                    "server": url,
                    "certificate-authority-data": base64.b64encode(credentials.authority.read_bytes()).decode(),
                },
            }
        ],
        "users": [{"name": name, "user": {"token": credentials.token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
        "current-context": name,
        "preferences": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, yaml.safe_dump(config, sort_keys=False).encode())


def write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and never readable by others."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _usable(path: Path, host: str = "") -> bool:
    try:
        return is_usable(path.read_bytes(), host)
    except OSError:
        return False


def is_usable(pem: bytes, host: str = "") -> bool:
    """It is a certificate, is valid for some time to come, and has that name."""
    try:
        found = x509.load_pem_x509_certificate(pem)
    except ValueError:
        return False
    if found.not_valid_after_utc < datetime.now(timezone.utc) + timedelta(days=_RENEW_DAYS):
        return False
    if not host:
        return True
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return _general_name(host) in list(names)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    @classmethod
    def of(cls, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
        form = serialization.PrivateFormat.PKCS8
        text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        return cls(certificate.public_bytes(serialization.Encoding.PEM), text)

    def save(self, path: Path, key_path: Path) -> None:
        write_private(key_path, self.key)
        write_private(path, self.certificate)


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _make_authority(path: Path, key_path: Path) -> None:
    new_authority().save(path, key_path)


def new_authority() -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: two clusters on one machine must not be taken for one.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"evertrain-ca-{secrets.token_hex(4)}")])
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=True,
                crl_sign=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    return Pair.of(certificate, key)


def _make_certificate(path: Path, key_path: Path, authority: Path, authority_key: Path, hosts: Sequence[str]) -> None:
    signer = Pair(authority.read_bytes(), authority_key.read_bytes())
    signed("evertrain-apiserver", (*_NAMES, "127.0.0.1", "::1", *hosts), signer).save(path, key_path)


def signed(name: str, hosts: Sequence[str], authority: Pair, *, client: bool = False) -> Pair:
    """A certificate for a server by these names; with `client` also for one that connects to others."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signer = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = dict.fromkeys(map(_general_name, hosts))
    usages = [ExtendedKeyUsageOID.SERVER_AUTH] + [ExtendedKeyUsageOID.CLIENT_AUTH] * client
    certificate = (
        _builder(subject, issuer.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return Pair.of(certificate, key)
