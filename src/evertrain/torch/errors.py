"""Errors that are the script's, and that trying again can't cure."""

from __future__ import annotations


class UsageError(ValueError):
    """Evertrain is used in a way that can't work; the text says what to do instead. Ends the job at once."""


class StateError(UsageError):
    """The model, the optimizer or an extra object can't be protected; the text says why and what to do."""
