"""The jobs of the cluster: what they are, and what others are told of them."""
