"""A real Kubernetes on one machine, for tests: each node has processes, mounts and a network of its own.

    python -m tests.kubernetes_cluster                 starts one and stays; Ctrl-C ends it
    python -m tests.kubernetes_cluster -- COMMAND ...  starts one, runs the command in it, and ends it
    python -m tests.kubernetes_cluster --build         only makes what it needs
    python -m tests.kubernetes_cluster --clean         removes what killed ones have left

The process that runs this has a network namespace of its own, in which are a bridge and the control plane. A node is a
process with a network, a mount and a process namespace: containerd, kubelet, kube-proxy and all pods are inside, and
they are gone when it is killed, as after a power cut. Its cable is a veth pair. Everything hangs on the parent-death
signal, so the kernel takes it all down when the first process ends, however it does; control groups and the folder of
the run, which the kernel doesn't remove, have the run's name on them, and a keeper removes them.
"""
