"""What a part of the training state must be able to do; see `evertrain.mindio.plan` for what parts are.

`TrainingState` is the part `state`, which every rank holds. A rank with sharded state has further ones.
"""

from __future__ import annotations

from typing import Any, Protocol

from evertrain.torch import codec


class Part(Protocol):
    def core(self) -> codec.Packed:
        """References to the live tensors whose hash is compared between ranks, and into which a repair receives."""
        ...

    def tree(self) -> dict[str, Any]:
        """Everything, to be sent or saved."""
        ...

    def load(self, tree: dict[str, Any]) -> None:
        """Take it over. Tensors of `core` that were received in place are not copied."""
        ...


class Update(Protocol):
    """An optimizer update that can be taken back, or that leaves two versions of a part to choose from."""

    def abandon(self, step: int) -> dict[str, int]:
        """The update that began at `step` will not be completed. Returns which parts are clean, and at which step."""
        ...

    def others(self) -> list[tuple[str, int]]:
        """(part, step) of the versions that are kept beside the present ones."""
        ...

    def switch(self, part: str, step: int) -> bool:
        """Make the version of that step the present one, and keep the other. False if there is none."""
        ...

    def forget(self) -> None:
        """Only the present versions count from here on."""
        ...
