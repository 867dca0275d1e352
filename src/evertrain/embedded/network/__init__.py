"""The network of a cluster's pods: a small world of its own inside of this machine.

    machine ═══ switch ═╦═ NICs ═ node-0 ═╦═ pod   eth0, eth1
       (root only)      ║                 ╚═ pod
                        ╚═ NICs ═ node-1 ═══ pod

Every pod has a network namespace, and so its own ports, loopback and addresses; so has every node, to whose bridges
its pods are plugged. A node has two NICs, one for each of two networks (rails) that are apart from each other down to
the pods; they end in the switches, in a namespace that belongs to the cluster. All of it is held by one process,
`holder`, a program like the nodes' runtime: whatever ends it, the kernel takes all namespaces and cables away with it.

Nothing leaves the machine: no namespace has a route to anywhere else. The servers of the cluster (API server, ClusterD)
don't live in this world. Their sockets do: who has made a socket in a namespace may serve it from outside.
"""
