#!/bin/bash
# bash train_start.sh CODE_DIR OUTPUT_DIR SCRIPT [ARGUMENT ...], in each pod of the job.
code_dir=$1 output_dir=$2 script=$3
shift 3
cd "$code_dir" || exit 1

# As the documents' `pip show taskd`, but quicker, and also where taskd comes with evertrain.
TASKD_SO_PATH="$(python -c 'import taskd; print(taskd.__path__[0])')/python/cython_api/libs/libtaskd.so"
[[ -e "$TASKD_SO_PATH" ]] && export LD_PRELOAD=$TASKD_SO_PATH:$LD_PRELOAD
export TASKD_PROCESS_ENABLE="on"
# PyTorch
if [[ "${RANK}" == 0 ]]; then
    export MASTER_ADDR=${POD_IP}
    python manager.py &           # Determined by the current path.
    manager=$!
fi
# MindSpore. There it is msrun that starts the training below, in the place of torchrun.
if [[ "${MS_SCHED_HOST}" == "${POD_IP}" ]]; then
    python manager.py &           # Determined by the current path.
fi

# In an image whose torchrun has the documents' line in it, this is not needed.
torchrun() { python -c 'import taskd.python.adaptor.patch, torch.distributed.run as run; run.main()' "$@"; }

# For the communication library of NPUs; without them it is not there, and nobody reads these.
export HCCL_OP_RETRY_ENABLE="L0:0, L1:1, L2:1" # it runs an operator again first, between servers and super pods
export HCCL_ASYNC_ERROR_HANDLING=0             # and leaves the process to whoever recovers it

DISTRIBUTED_ARGS="--nproc_per_node 2 --nnodes 2 --node_rank $RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT --max_restarts 32767"
torchrun $DISTRIBUTED_ARGS --log_dir "$output_dir/torchrun" "$script" --dir "$output_dir" "$@"
code=$?
# The manager hears from its torchrun that the job is over. One that was killed has said nothing: without this the pod would not end.
if [[ $code != 0 && $manager ]]; then
    timeout 10 tail -s 0.1 --pid="$manager" -f /dev/null
    kill "$manager" 2> /dev/null
fi
wait
exit $code
