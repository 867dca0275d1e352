"""A spare for a training that torchrun leads, in TaskD's hands: it becomes what `python -u script.py` would be.

    python -u -m evertrain.torch.plain_spare --rank unknown [--module] -- script.py ARG...

Unlike the spare of `evertrain launch` it brings nothing of Evertrain into the training: threads are as many as the
environment says, torch's compiler is loaded where torch loads it, and signal handlers are left alone. Standard output
and error are torchrun's until it is promoted; then they may be a rank's log files. It ends with its agent.
"""

from __future__ import annotations

import os
import sys

from evertrain.torch import boot, parking, spare


def main() -> None:
    module, arguments = boot.parse(sys.argv[1:])
    del sys.argv[1:]
    boot.die_with_agent()
    boot.keep_descriptors_private()
    link = parking.Link(int(os.environ.pop(boot.SPARE_FD)))
    if not module:
        # Modules to be warm with may lie beside the script, as its own imports will find them.
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
    given = set(os.environ)
    spare.warm_up(())
    for name in os.environ.keys() - given:
        del os.environ[name]  # torch's compiler sets some; it will again if it is used
    link.tell(ready=True)
    boot.run(link.wait_for_promotion())


if __name__ == "__main__":
    main()
