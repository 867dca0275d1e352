"""See `taskd`."""
