"""The PyTorch adaptor: what a training script imports.

Importing this package, or the modules that run before the script (`boot`, `spare`), does not import torch: the user
API is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evertrain.torch.training import Training

__all__ = ["Training"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from evertrain.torch import link, training

        link.prepare_script()
        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
