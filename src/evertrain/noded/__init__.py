"""The daemon of a node: sees what is wrong with its chips, its links and itself, and publishes it for ClusterD."""
