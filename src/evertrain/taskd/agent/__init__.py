"""The agent of a pod: torchrun or msrun, which starts, stops and replaces processes as the manager orders."""
