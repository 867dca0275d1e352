"""Which of torch's modules a job needs, so that a spare can have them before it is needed.

FSDP2, the compiler and other parts of torch are seconds of modules that not every job uses. A rank that has completed a
step has imported all that its script takes; it leaves the list on its board, and the agent hands it to the next spare.
Only torch's own modules: importing them does nothing else, which nobody knows of others (see `--ft-warm-import`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

from evertrain.torch import lazy_dynamo

_PREFIX = "torch."


def loaded() -> list[str]:
    """In the order of their import."""
    put_off = lazy_dynamo.is_light()
    return [
        name
        for name, module in list(sys.modules.items())
        if name.startswith(_PREFIX)
        and getattr(getattr(module, "__spec__", None), "origin", None)
        and not (put_off and name == lazy_dynamo.PACKAGE)
    ]


def load(names: Iterable[str]) -> None:
    """Whatever can be imported of them; torch itself has to be there already."""
    for name in names:
        if name.startswith(_PREFIX) and (name not in sys.modules or name == lazy_dynamo.PACKAGE):
            try:
                module = importlib.import_module(name)
                getattr(module, "__path__", None)  # a package that was put off (`lazy_dynamo`) loads in earnest
            except Exception:
                continue  # the script will import it, or see the error
