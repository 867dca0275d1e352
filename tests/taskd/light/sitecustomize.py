"""First in the path of a pod's processes: they don't load torch's compiler, a third of what a job of them costs."""

from evertrain.torch import lazy_dynamo

lazy_dynamo.install()
