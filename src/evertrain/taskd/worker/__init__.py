"""TaskD inside a training process: link failover, stress test and profiling on the manager's order."""
