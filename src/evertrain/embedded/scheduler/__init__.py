"""Places pods on nodes: gangs whole or not at all, with their chips."""
