"""The Kubernetes API on one machine: what `kubectl` and our own parts talk to."""
