"""TaskNet: how manager, proxies, agents and workers of a job reach each other."""

from evertrain.wire import forks

forks.load_grpc()
