"""The gRPC side of ClusterD: thin servicers over the hub (`ports`), limits, and who may ask for what.

Nothing is decided here about jobs and faults. A servicer checks a request, hands it to the hub as a value, and turns
what comes back into the messages of the wire; `server` puts all of them on one address.
"""
