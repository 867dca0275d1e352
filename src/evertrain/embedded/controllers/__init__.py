"""What Kubernetes' own controllers do for the objects of the embedded cluster. They use the port and nothing else."""

from evertrain.embedded.controllers.events import EventExpiry
from evertrain.embedded.controllers.garbage import GarbageCollector
from evertrain.embedded.controllers.nodes import NodeLifecycle
from evertrain.embedded.controllers.removal import Removal

__all__ = ["EventExpiry", "GarbageCollector", "NodeLifecycle", "Removal"]
