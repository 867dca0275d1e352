"""Who is let in. Certificates are looked at by gRPC, before anybody says a word; tokens here, with each call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from evertrain.clusterd.services.certificates import Certificates
from evertrain.clusterd.services.tokens import TOKEN_KEY, Tokens

WHOLE_CLUSTER = "-1"
"""What the Fault service calls all jobs together."""


@dataclass(frozen=True, slots=True)
class Security:
    """Certificates, tokens, or both; then both are needed. Neither only if somebody wants it so.

    ValueError if nothing would keep anybody out.
    """

    certificates: Certificates | None = None
    tokens: Tokens | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.certificates is None and self.tokens is None and not self.insecure:
            raise ValueError(
                "neither certificates nor a secret for the tokens of jobs: whoever reaches the port could lead every"
                " job. Give one of them, or say that it shall be insecure"
            )

    async def admit(self, context: Any, job: str = "", members: Iterable[str] = ()) -> str:
        """Go on, if the caller may speak for this job; without one, for the platform.

        What is meant by `job` may be a service of several jobs: each of these `members` may speak for it. Which one it
        is, if it is one.
        """
        if self.tokens is None:
            return ""
        token = next((str(value) for key, value in context.invocation_metadata() or () if key == TOKEN_KEY), "")
        if job and job != WHOLE_CLUSTER:
            if self.tokens.is_of_job(token, job) or self.tokens.is_of_platform(token):
                return ""
            for member in members:
                if self.tokens.is_of_job(token, member):
                    return member
            what = "the token of the job is missing or wrong"
        else:
            if self.tokens.is_of_platform(token):
                return ""
            what = "this takes the token of the platform"
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, what)
        return ""
