"""Virtual nodes: pods as process groups on this machine."""
