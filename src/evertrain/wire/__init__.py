"""Messages and services of the gRPC wire. `*_pb2` are generated from `proto/` by `make proto`."""
