"""At the end of which step a rank waits, when it was asked to pause.

A rank that is asked says at once how many steps it has completed, and goes no further than the end of the step that it
is in. So when all have answered, nobody can be beyond one more than the highest number, and everybody can get there:
that is where all of them pause. Asking and answering happen in the link's thread, whatever the training thread does.
"""

from __future__ import annotations

import threading
from typing import Protocol

from evertrain.mindio import protocol
from evertrain.mindio.processor import Processor


class HasStep(Protocol):
    step: int


class Pausing:
    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self.lock = threading.Lock()
        """Held while the step counter changes: either the answer has the new number, or the end of that very step is
        where this rank stops."""
        self.number = 0
        """Of the pause that was asked for; 0 for none."""
        self._step = 0
        self.agreed = False
        """This is the step that all ranks pause at; otherwise it is where this one waits to learn which it is."""

    def hear(self, message: protocol.Pause | protocol.PauseAt, state: HasStep) -> None:
        """Called by the link's thread."""
        with self.lock:
            step = state.step
            if isinstance(message, protocol.Pause):
                self.number, self._step, self.agreed = message.number, step + 1, False
            elif message.number == self.number:
                self._step, self.agreed = message.step, True
        if isinstance(message, protocol.Pause):
            self._processor.send(protocol.At(number=message.number, step=step))

    def is_due(self, step: int) -> bool:
        with self.lock:
            return self.number > 0 and step >= self._step

    def end(self, number: int) -> None:
        """Pauses up to this number are over."""
        with self.lock:
            if self.number <= number:
                self.number = 0
