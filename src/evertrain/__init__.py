"""Evertrain keeps distributed training running through faults."""

__version__ = "0.1.0"
