"""Networks of pods: are they allowed here, and how to have them as an ordinary user?"""

from __future__ import annotations

import pytest

from evertrain import aio
from evertrain.embedded.network.fabric import Fabric, NotAllowed


def _why_not() -> tuple[str, str]:
    """Why there can be none, and why this machine could not reach it."""

    async def attempt() -> tuple[str, str]:
        try:
            fabric = await Fabric.start()
        except NotAllowed as error:
            return str(error), str(error)
        fabric.close()
        return "", fabric.unreachable

    return aio.run(attempt())


_REFUSED, _UNREACHABLE = _why_not()
needs_networks = pytest.mark.skipif(bool(_REFUSED), reason="namespaces for networks need root or user namespaces")
needs_reach = pytest.mark.skipif(bool(_UNREACHABLE), reason="only root may connect this machine with pods")


AS_ORDINARY_USER = """
import os, sys
from evertrain.embedded import kernel
users = os.geteuid(), os.getegid()
kernel.unshare(kernel.CLONE_NEWUSER)
for file, line in (("setgroups", "deny"), ("uid_map", f"1000 {users[0]} 1"), ("gid_map", f"1000 {users[1]} 1")):
    with open(f"/proc/self/{file}", "w") as opened:
        opened.write(line)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""For `python -c`: the command behind it has no rights over this machine, whoever runs the tests."""
