"""The runtime of a virtual node: a small process that starts and ends containers.

It is a program of its own, on the standard library alone, because its processes are forked: a process with threads
can't be forked safely, and a large one not cheaply. Per node there is one runtime process, per container one init
process, both ours, and below it the container's own processes:

    cluster ── runtime (node) ── init (container) ── main process ── …

Whatever dies takes with it what hangs below. The cluster holds one end of a socket to each: when it is gone, however it
went, the other end reads the end of the stream and leaves. Parents that vanish are also announced by the kernel
(PR_SET_PDEATHSIG). And where the kernel allows it, runtime and init are each the first process of a process id
namespace, so that nothing can outlive them.
"""
