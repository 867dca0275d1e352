"""The server's certificates. Both sides show one of the same authority; a client without is refused by gRPC.

The files are looked at with each new connection: one that is renewed where it is mounted counts from then on, without
a restart. If what is there is not usable, the one before stays, and the log says why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc

from evertrain.mindio import tls

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificates:
    authority: Path
    certificate: Path
    key: Path

    def check(self) -> None:
        """ValueError that says which file can't be used, and why."""
        info = tls.TlsInfo.from_files(str(self.certificate), str(self.key), str(self.authority))
        tls.check(info, datetime.now(timezone.utc))
        tls.client_context(info)  # and that the key belongs to the certificate

    def server(self) -> grpc.ServerCredentials:
        """ValueError if they can't be used."""
        self.check()
        seen = self._stamp()
        told = ""

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen, told
            try:
                stamp = self._stamp()
                if stamp == seen:
                    return None
                self.check()
                configuration = self._configuration()
            except (OSError, ValueError) as error:
                if str(error) != told:
                    told = str(error)
                    log.error("the renewed certificates can't be used, those before are kept: %s", error)
                return None
            seen, told = stamp, ""
            log.info("the certificates were renewed")
            return configuration

        fetch: Any = renewed  # None, for no change, is missing in its type
        return grpc.dynamic_ssl_server_credentials(self._configuration(), fetch, require_client_authentication=True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self.authority.read_bytes())

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        files = (self.authority, self.certificate, self.key)
        return tuple((status.st_ino, status.st_mtime_ns) for status in (file.stat() for file in files))
