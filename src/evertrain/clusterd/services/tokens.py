"""Who may speak for a job: a token that is made from one secret of the cluster. Pure.

ClusterD and the operator know the secret (a Kubernetes Secret that both mount). The token of a job is the HMAC-SHA256
of `job:<uid>` under it, in hex, so nothing about single jobs has to be kept or told anybody: the operator computes the
token when it makes the pods, and puts it, by a Secret of the job, into their environment as EVERTRAIN_TOKEN, which is
where TaskD looks for it; ClusterD computes it again when a call comes, and compares. Whoever has the token of one job
has no other's. What concerns all jobs (lists of jobs, faults of the whole cluster, public faults) takes the platform's
token, the HMAC of `platform`; it is good for every job, too.

A call carries its token as metadata `x-job-token`. By hand:

    printf 'job:%s' "$UID" | openssl dgst -sha256 -hmac "$(cat secret)"

To change the secret without disturbing jobs that run, put the new one into the first line of the file, and leave the
old one below until those jobs are over: the first makes tokens, each is accepted.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

TOKEN_KEY = "x-job-token"
SHORTEST = 16
"""Bytes of a secret: less could be guessed."""
_JOB, _PLATFORM = "job:", "platform"


class Tokens:
    def __init__(self, secrets: Iterable[bytes]) -> None:
        """ValueError if there is none, or one that is too short."""
        self._secrets = tuple(secrets)
        if not self._secrets:
            raise ValueError("there is no secret to make tokens from")
        if any(len(secret) < SHORTEST for secret in self._secrets):
            raise ValueError(f"a secret to make tokens from needs at least {SHORTEST} bytes")

    @classmethod
    def read(cls, content: bytes) -> Tokens:
        """Of a file: a secret in each line."""
        return cls(line.strip() for line in content.splitlines() if line.strip())

    def job(self, uid: str) -> str:
        return _sign(self._secrets[0], _JOB + uid)

    def platform(self) -> str:
        return _sign(self._secrets[0], _PLATFORM)

    def is_of_job(self, token: str, uid: str) -> bool:
        return self._is(token, _JOB + uid)

    def is_of_platform(self, token: str) -> bool:
        return self._is(token, _PLATFORM)

    def _is(self, token: str, text: str) -> bool:
        shown = token.encode(errors="replace")
        return any([hmac.compare_digest(_sign(secret, text).encode(), shown) for secret in self._secrets])

    def __repr__(self) -> str:
        return f"Tokens({len(self._secrets)} secrets)"


def _sign(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(errors="replace"), "sha256").hexdigest()
