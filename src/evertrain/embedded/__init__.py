"""A cluster in one process: API server on SQLite, scheduler, nodes whose pods are processes."""
