#!/bin/bash
# Measures the cluster: devices and links into cluster.yaml, layer times into profile.json.
#
# Ask for the nodes that you want to train on, all GPUs of each, on the command line; nodes that
# differ are components of a heterogeneous job, with " : " between them:
#
#   sbatch --partition=a100 --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 : \
#          --partition=t4 --nodes=3 --ntasks-per-node=4 --gpus-per-node=4 discover.sh
#
#SBATCH --job-name=zorse-discover
#SBATCH --output=%x-%j.txt
#SBATCH --time=1:00:00

set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source ./settings.sh
export CUDA_DEVICE_ORDER=PCI_BUS_ID    # local ranks count GPUs as the driver does

# A rank that fails tells the others, which end by themselves.
step=(srun --mpi=none --distribution=block --kill-on-bad-exit=0 --wait=60)
if [[ ${SLURM_HET_SIZE:-} ]]; then
    step+=("--het-group=0-$((SLURM_HET_SIZE - 1))")
fi
"${step[@]}" "$PYTHON" -m zorse_megatron discover \
    --out "$CLUSTER" --profile "$PROFILE" "${DISCOVER[@]}"
"${step[@]}" "$PYTHON" -m zorse_megatron profile measure \
    --cluster "$CLUSTER" --out "$PROFILE" "${MEASURE[@]}" -- "${TRAINING[@]}"
