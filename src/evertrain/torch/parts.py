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

    def core_of(self, tree: dict[str, Any]) -> codec.Packed:
        """What `core` will be once the tree is loaded."""
        ...

    def check(self, tree: dict[str, Any]) -> None:
        """StateError if it can't be taken over. Changes nothing."""
        ...

    def tree(self) -> dict[str, Any]:
        """Everything, to be sent or saved."""
        ...

    def load(self, tree: dict[str, Any]) -> None:
        """Take it over, after a `check`. Tensors of `core` that were received in place are not copied."""
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
