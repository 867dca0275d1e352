"""What MindCluster's documents have users write, character for character; only the two `XX` have a number.

Lines are as they stand there, without the indentation of the page. What the documents leave out (`...`) is around them.
"""

from __future__ import annotations

MANAGER = """\
from taskd.api import init_taskd_manager, start_taskd_manager
import os
\x20
job_id=os.getenv("MINDX_TASK_ID")
node_nums=2         # Total number of nodes (set by yourself)
proc_per_node=2     # Number of training processes on each node (set by yourself)
\x20
init_taskd_manager({"job_id":job_id, "node_nums": node_nums, "proc_per_node": proc_per_node})
start_taskd_manager()
"""

# Dockerfile: what stands behind RUN.
DOCKERFILE_PYTORCH = """
pip3 install $TASKD_WHL
pip3 install $MINDIO_TTP_PKG
sed -i '/import os/i import taskd.python.adaptor.patch' $(pip3 show torch | grep Location | awk -F ' ' '{print $2}')/torch/distributed/run.py
"""  # noqa: E501
DOCKERFILE_MINDSPORE = """
pip3 install $MINDIO_TTP_PKG
pip3 install $TASKD_WHL
"""

# train_start.sh.
PRELOAD = """\
TASKD_SO_PATH="$(pip show taskd | awk '/^Location: / {print $2"/taskd/python/cython_api/libs/libtaskd.so"}')"
export LD_PRELOAD=$TASKD_SO_PATH:$LD_PRELOAD
export TASKD_PROCESS_ENABLE="on"
"""
MANAGERS = """\
# PyTorch
if [[ "${RANK}" == 0 ]]; then
   export MASTER_ADDR=${POD_IP}
    python manager.py &           # Determined by the current path.
fi
# MindSpore
if [[ "${MS_SCHED_HOST}" == "${POD_IP}" ]]; then
    python manager.py &   # Determined by the current path.
fi
"""
# The same on the page about hot switching, which adds what helps if "the libtaskd.so has not been loaded".
PRELOAD_WITH_MSPTI = """\
export LD_PRELOAD=/usr/local/Ascend/cann/lib64/libmspti.so:/usr/local/lib/python3.10/dist-packages/taskd/python/cython_api/libs/libtaskd.so
"""  # noqa: E501
PACKAGES = "/usr/local/lib/python3.10/dist-packages"
"""The place in it that is TaskD's, which users have to put in."""
MANAGERS_OF_HOT_SWITCHING = """\
export TASKD_PROCESS_ENABLE="on"\x20
\x20
# PyTorch
if [[ "${RANK}" == 0 ]]; then
    export MASTER_ADDR=${POD_IP}\x20
    python manager.py &            # Determined by the current path.
fi\x20
      \x20
# MindSpore
if [[ "${MS_SCHED_HOST}" == "${POD_IP}" ]]; then\x20
    python manager.py &   # Determined by the current path.
fi\x20
      \x20
"""
TORCHRUN = """\
   logger "server id is: ""${server_id}"
   if [ "${framework}" == "PyTorch" ]; then
     get_env_for_pytorch_multi_node_job
     DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT  --max_restarts 32767"
"""  # noqa: E501


def _start(lines: str) -> str:
    return f"""\
framework=PyTorch
server_id=$RANK
logger() {{ echo "$@"; }}
get_env_for_pytorch_multi_node_job() {{ GPUS_PER_NODE=2 NNODES=2 NODE_RANK=$RANK; }}
{lines}{TORCHRUN}   fi
torchrun $DISTRIBUTED_ARGS "$@"
code=$?
wait
exit $code
"""


START = _start(PRELOAD + MANAGERS)
START_WITH_MSPTI = _start(PRELOAD_WITH_MSPTI + MANAGERS_OF_HOT_SWITCHING)
