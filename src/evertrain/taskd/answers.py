"""The functions of `taskd.api` answer with True or False; whatever went wrong is in the log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec

from evertrain.taskd import log as logs

P = ParamSpec("P")
log = logging.getLogger(__name__)


def answered(what: str) -> Callable[[Callable[P, bool]], Callable[P, bool]]:
    """`what` is done by the function; an exception means that it failed."""

    def decorate(function: Callable[P, bool]) -> Callable[P, bool]:
        @functools.wraps(function)
        def answer(*args: P.args, **kwargs: P.kwargs) -> bool:
            try:
                logs.open_run()
                return function(*args, **kwargs)
            except Exception as error:  # the caller is a training, or starts one; it looks at the answer
                log.error("%s failed: %s", what, str(error) or repr(error))
                return False

        return answer

    return decorate


def needed(config: Any) -> dict[str, Any]:
    """A configuration. TypeError if it is none."""
    if not isinstance(config, dict):
        raise TypeError(f"a dict is needed as configuration, not {repr(config)[:100]}")
    return config
