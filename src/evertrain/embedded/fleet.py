"""The virtual nodes of a cluster: which of them run, and who has the log of a pod.

A node is switched off and on by an annotation (see power.py). That order is kept with the node, so one that was off
when the cluster ended is off when it starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from evertrain.embedded.api.logs import LogRequest, LogsUnavailable
from evertrain.embedded.power import OFF, ON, ORDER, STATE
from evertrain.kube.cache import Cache
from evertrain.kube.port import NODE, ApiError, Kube, Object

logger = logging.getLogger(__name__)
