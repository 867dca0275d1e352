"""`evertrain credentials`: the Secrets by which the parts of an installation know each other, where they are missing.

It runs once with each installation, in a pod of its own that alone may write these Secrets. What is there and good
stays as it is, so it can be run again at any time: after it was killed halfway, with an upgrade, to renew.
"""

from __future__ import annotations

import argparse
import base64
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain.acjob import names
from evertrain.cli import running

if TYPE_CHECKING:
    from evertrain.kube.port import Kube, Object

TOKENS, AUTHORITY, SERVER, JOBS = "evertrain-tokens", "evertrain-ca", "clusterd-tls", "evertrain-job-tls"
SECRET_KEY, CERTIFICATE, KEY, CA = "secret", "tls.crt", "tls.key", "ca.crt"
SERVICE = names.CLUSTERD_SERVICE
HOSTS = (
    names.CLUSTERD_DOMAIN,
    *(f"{SERVICE}{rest}" for rest in (f".{names.CLUSTERD_NAMESPACE}.svc", f".{names.CLUSTERD_NAMESPACE}", "")),
    "localhost",
    "127.0.0.1",
)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="evertrain credentials",
        description="Makes the Secrets that an installation on Kubernetes needs, where they are missing:\n"
        f"  {TOKENS:18} what the tokens of jobs are made from (ClusterD, operator)\n"
        f"  {AUTHORITY:18} a certificate authority of this cluster's own\n"
        f"  {SERVER:18} ClusterD's certificate\n"
        f"  {JOBS:18} the certificate that the operator gives to jobs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--namespace", default=names.CLUSTERD_NAMESPACE, help="default: %(default)s")
    found.add_argument("--tokens-only", action="store_true", help="no certificates: somebody else makes them")
    found.add_argument("--renew", action="store_true", help="new certificates, also where there are good ones")
    kubeconfig = "default: the pod's service account, $KUBECONFIG"
    found.add_argument("--kubeconfig", type=Path, metavar="FILE", help=kubeconfig)
    return found


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)

    async def work() -> int:
        from evertrain.kube import daemon

        try:
            async with daemon.connected(options) as kube:
                for line in await make(kube, options.namespace, options.tokens_only, options.renew):
                    print(line, flush=True)
        except daemon.CannotStart as error:
            raise running.CommandError(str(error)) from None
        return 0

    return running.run("credentials", work)


async def make(kube: Kube, namespace: str, tokens_only: bool = False, renew: bool = False) -> list[str]:
    """What was done, in words. Raises ApiError, OSError or TimeoutError."""
    from evertrain.embedded.certificates import Pair, is_usable, new_authority, signed

    cabinet = _Cabinet(kube, namespace)
    if await cabinet.find(TOKENS) is None:
        await cabinet.put(TOKENS, {SECRET_KEY: secrets.token_urlsafe(32).encode()})
    if tokens_only:
        return cabinet.done

    there = await cabinet.find(AUTHORITY) or {}
    if is_usable(there.get(CERTIFICATE, b"")) and there.get(KEY):
        authority = Pair(there[CERTIFICATE], there[KEY])
    else:
        authority = new_authority()
        await cabinet.put(AUTHORITY, {CERTIFICATE: authority.certificate, KEY: authority.key})

    for name, hosts in ((SERVER, HOSTS), (JOBS, (JOBS,))):
        there = await cabinet.find(name) or {}
        good = is_usable(there.get(CERTIFICATE, b""), hosts[0]) and there.get(CA) == authority.certificate
        if renew or not (good and there.get(KEY)):
            pair = signed(name, hosts, authority, client=name == JOBS)
            await cabinet.put(name, {CA: authority.certificate, CERTIFICATE: pair.certificate, KEY: pair.key})
    return cabinet.done


class _Cabinet:
    """The Secrets of one namespace."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self._found: dict[str, Object] = {}
        self.done: list[str] = []

    async def find(self, name: str) -> Mapping[str, bytes] | None:
        from evertrain.kube.port import SECRET, NotFound

        try:
            item = await self._kube.get(SECRET, name, self._namespace)
        except NotFound:
            return None
        self._found[name] = item
        self.done.append(f"{name} is there")
        return {key: base64.b64decode(value) for key, value in (item.get("data") or {}).items()}

    async def put(self, name: str, content: Mapping[str, bytes]) -> None:
        from evertrain.kube.port import SECRET

        data = {key: base64.b64encode(value).decode() for key, value in content.items()}
        there = self._found.get(name)
        if there is None:
            item = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": self._namespace}}
            await self._kube.create(SECRET, item | {"type": "Opaque", "data": data})
            self.done.append(f"{name} is made")
        else:
            await self._kube.replace(SECRET, there | {"data": data})
            self.done[self.done.index(f"{name} is there")] = f"{name} is renewed"
