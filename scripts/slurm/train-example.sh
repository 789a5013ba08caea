#!/bin/bash
# Trains under plan.json (plan 0cb3d7f99c53e1d8) on the GPUs of two-node lab.
# Written by zorse launch; submit it with sbatch, from the directory of its files.
# checksum 4c33b06c3e7a8d17
#   component 0: ranks 0 to 3, 4 A6000
#   component 1: ranks 4 to 7, 4 V100-16
#SBATCH --job-name=zorse
#SBATCH --output=%x-%j.txt
#SBATCH --open-mode=append
#SBATCH --partition=new
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --requeue
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH hetjob
#SBATCH --partition=old
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --requeue
#SBATCH --time=24:00:00

PYTHON=python
MAX_RESTARTS=${MAX_RESTARTS:-20}    # a job that was started again so often ends at its next failure
GRACE_S=${GRACE_S:-60}              # seconds until ranks are ended after one of them has ended

# What the latest checkpoint is, before and after.
latest() { cat -- checkpoints/latest_checkpointed_iteration.txt 2>/dev/null; }
before=$(latest)

# Local ranks count GPUs as the cluster file does, and not the fastest one first.
export CUDA_DEVICE_ORDER=PCI_BUS_ID

# Before the time limit Slurm sends USR1 to this script; TERM lets the ranks save and end.
stopped=
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun --het-group=0,1 --mpi=none --distribution=block --kill-on-bad-exit=0 --wait="$GRACE_S" \
    "$PYTHON" -m zorse_megatron.pretrain \
    pretrain_gpt.py \
    --num-layers 8 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 512 \
    --position-embedding-type rope \
    --untie-embeddings-and-output-weights \
    --vocab-size 32000 \
    --fp16 \
    --global-batch-size 16 \
    --eval-interval 1000 \
    --save checkpoints \
    --save-interval 100 \
    --zorse-plan plan.json \
    --load checkpoints \
    --exit-signal-handler \
    --zorse-damaged-checkpoint skip &
srun_pid=$!
while kill -0 "$srun_pid" 2>/dev/null; do
    wait "$srun_pid"    # a signal ends it, too, with a status of its own
done
wait "$srun_pid"
status=$?

# Status 2 is bad input, which another start does not change. A job that is stopped starts again as
# often as it takes, as long as it has saved something each time.
restarts=${SLURM_RESTART_COUNT:-0}
saved=
[[ $(latest) == "$before" ]] || saved=1
if ((status != 2)) && { [[ $stopped && $saved ]] ||
    { { [[ $stopped ]] || ((status != 0)); } && ((restarts < MAX_RESTARTS)); }; }; then
    echo "status $status after $restarts restarts: back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit "$status"
    echo "zorse: error: Slurm does not take the job back, so it ends here and is not done."
    echo "Submit it again: it goes on from its last checkpoint."
    ((status != 0)) || status=1    # after a save it is 0, and the job would seem COMPLETED
elif [[ $stopped ]] && ((status == 0)); then
    echo "zorse: error: stopped after $restarts restarts before it has saved anything: it ends."
    status=1
fi
exit "$status"
