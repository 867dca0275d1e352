"""Errors that are the script's, and that trying again can't cure."""

from __future__ import annotations

import os
import traceback

NOT_RESILIENT = (
    "decorate the function that contains the loop with @training.resilient: outside of it the ranks do not exchange "
    "gradients (to evaluate, use training.model.eval() or torch.no_grad())"
)
NO_STEPS = (
    "loop over training.steps(loader, until=...) in the function that is decorated with @training.resilient: without "
    "it no step is counted, and a recovery would begin from the first batch"
)


class UsageError(ValueError):
    """Evertrain is used in a way that can't work; the text says what to do instead. Ends the job at once."""


class StateError(UsageError):
    """The model, the optimizer or an extra object can't be protected; the text says why and what to do."""


def user_frames(error: BaseException) -> str:
    """Where the script was, as in a traceback, without the frames of this package and of torch."""
    import torch

    inner = [os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__)]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*inner, "<frozen "))
    ]
    return "".join(traceback.format_list(frames))
