#!/bin/bash
# Compares stock Megatron, the baselines and the plan on the measured cluster, emulated on the cores
# of one node: no GPU is needed. Table, pictures and a page are written to $COMPARED.
#
#SBATCH --job-name=zorse-compare
#SBATCH --output=%x-%j.txt
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=2:00:00

set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source ./settings.sh

zorse compare --cluster "$CLUSTER" --profile "$PROFILE" --out "$COMPARED" -- "${TRAINING[@]}"
