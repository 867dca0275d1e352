"""The PyTorch adaptor: what a training script imports.

Importing this package, or the modules that run before the script (`boot`, `spare`), does not import torch: the user
API is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evertrain.torch.training import Training
    from evertrain.torch.values import Values

__all__ = ["Training", "Values"]


def __getattr__(name: str) -> Any:
    if name == "Values":
        from evertrain.torch.values import Values

        return Values
    if name in __all__:
        from evertrain.torch import link, training

        link.prepare_script()
        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
