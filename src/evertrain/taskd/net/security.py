"""Who may speak: certificates, and the token of the job. Both are used where they are configured."""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc

from evertrain.mindio import tls

TOKEN_KEY = "x-job-token"


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of one member: the authority that both sides trust, and the own certificate with its key."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def _info(self) -> tls.TlsInfo:
        return tls.TlsInfo.from_files(str(self.certificate), str(self.key), str(self.authority))

    def check(self) -> None:
        """ValueError that says which file can't be used, and why."""
        tls.check(self._info, datetime.now(timezone.utc))
        tls.client_context(self._info)  # and that the key belongs to the certificate

    def server(self) -> grpc.ServerCredentials:
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], self.authority.read_bytes(), require_client_auth=True)

    def client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.authority.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )

    async def name_at(self, address: str) -> str:
        """A name in the certificate of the one that listens there. OSError says why it is refused, or refuses us.

        No certificate knows the addresses that pods will have, so names are not compared: who has a certificate of the
        authority belongs to the job. gRPC insists on a name, and gets the one that is there.
        """
        host, _, port = address.rpartition(":")
        try:
            context = tls.client_context(self._info)
            context.set_alpn_protocols(["h2"])
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
            try:
                if not await reader.read(1):  # in TLS 1.3 a refusal comes after the handshake
                    raise OSError("it broke off after the TLS handshake: perhaps it refuses our certificate")
                return _name(writer.get_extra_info("peercert"))
            finally:
                writer.close()
        except (ssl.SSLError, tls.TlsError) as error:
            raise OSError(f"TLS: {tls.reason(error)}") from None


def _name(certificate: Mapping[str, Any]) -> str:
    names = [name for _, name in certificate.get("subjectAltName", ())]
    subject = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return next((name.replace("*", "any") for name in (*names, *subject)), "")


@dataclass(frozen=True, slots=True)
class Security:
    token: str = ""
    certificates: Certificates | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, self.token),) if self.token else ()

    def admits(self, context: Any) -> bool:
        """Does the caller know the token?"""
        if not self.token:
            return True
        shown = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        return hmac.compare_digest(str(shown).encode(), self.token.encode())

    def __repr__(self) -> str:
        return f"Security(token={'set' if self.token else 'none'}, certificates={self.certificates})"
