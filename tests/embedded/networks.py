"""Are namespaces for networks allowed here?"""

from __future__ import annotations

import pytest

from evertrain import aio
from evertrain.embedded.network.fabric import Fabric, NotAllowed


def _why_not() -> str:
    async def attempt() -> str:
        try:
            fabric = await Fabric.start()
        except NotAllowed as error:
            return str(error)
        fabric.close()
        return ""

    return aio.run(attempt())


needs_networks = pytest.mark.skipif(bool(_why_not()), reason="namespaces for networks need root or user namespaces")
