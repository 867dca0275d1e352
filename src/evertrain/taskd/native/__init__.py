"""The C library that records what a process died of, and what reads its record."""
