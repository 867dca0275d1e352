"""Turns torchrun into TaskD's agent. What is done lives in `evertrain.taskd.agent`."""

import os
import sys

from evertrain.taskd.agent.known_torch import UnknownTorch


def patch_torch_method() -> None:
    """A torch that is not known is left as it is; in a job of the cluster that is an error."""
    try:
        from evertrain.taskd.agent import pytorch, standby, torch_private  # which looks for what it needs of torch

        torch_private.patch(pytorch.invoke_run)
        if os.environ.get("MINDX_TASK_ID"):
            torch_private.launch_as_pod(standby.stand_by)
            if (unread := torch_private.unread()) is not None:
                print(f"taskd: {unread}", file=sys.stderr)
    except UnknownTorch as error:
        if os.environ.get("MINDX_TASK_ID"):
            raise
        print(f"taskd: {error}", file=sys.stderr)
