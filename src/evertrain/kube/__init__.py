"""The Kubernetes API as our parts see it: a small port, a client behind it, a cache and a work queue before it."""
