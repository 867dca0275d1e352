"""What the launcher tells its user instead of starting."""

from __future__ import annotations


class ConfigError(ValueError):
    """The command line, a variable or the configuration file can't be used; the message says why."""
