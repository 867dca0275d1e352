"""Which of several pods serves, shown to the Service that all clients come through.

Only the leader listens. If readiness said who that is, one pod of two would never be ready, and no rollout of the
Deployment would ever end. So both are ready, and the leader's pod has a label that the Service asks for. The next
leader takes it from the one before, who may be on a node that nobody can reach and look ready for forty seconds more.
"""

from __future__ import annotations

import asyncio
import logging

from evertrain.kube.port import POD, ApiError, Kube, NotFound

logger = logging.getLogger(__name__)

LEADS, TRUE = "evertrain.dev/leads", "true"
AGAIN = 1.0


async def show_leader(kube: Kube, namespace: str, pod: str) -> None:
    """Returns when the pod, and no other, is shown as the leader."""
    told = ""
    while True:
        try:
            await _label(kube, namespace, pod, TRUE)
            for other in (await kube.list(POD, namespace, labels=f"{LEADS}={TRUE}")).items:
                if (name := other["metadata"]["name"]) != pod:
                    await _label(kube, namespace, name, None)
            return
        except (ApiError, OSError, TimeoutError) as error:
            if str(error) != told:
                told = str(error)
                logger.warning("the Service can't be told that %s leads: %s", pod, error)
            await asyncio.sleep(AGAIN)


async def _label(kube: Kube, namespace: str, pod: str, value: str | None) -> None:
    try:
        await kube.patch(POD, pod, namespace, {"metadata": {"labels": {LEADS: value}}})
    except NotFound:
        if value is not None:
            raise
