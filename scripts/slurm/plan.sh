#!/bin/bash
# Plans for what discover.sh has measured, and writes the training job. Needs no GPU:
#
#   sbatch --dependency=afterok:$DISCOVER_JOB plan.sh
#   SUBMIT=1 sbatch ...                        submits the training job, too
#
#SBATCH --job-name=zorse-plan
#SBATCH --output=%x-%j.txt
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --time=1:00:00

set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source ./settings.sh

zorse plan --cluster "$CLUSTER" --profile "$PROFILE" --out "$PLAN" \
    ${PLANNING[@]+"${PLANNING[@]}"} -- "${TRAINING[@]}"
if [[ -e "${PLAN%.json}.cluster.yaml" ]]; then # GPUs are left out, as spares
    CLUSTER="${PLAN%.json}.cluster.yaml"
fi
zorse explain "$PLAN" --cluster "$CLUSTER" --profile "$PROFILE" -- "${TRAINING[@]}"
zorse check "$PLAN" "$CLUSTER" "$PROFILE" -- "${TRAINING[@]}"
# The cluster file has the names of the nodes that were measured: the job asks for these.
zorse launch "$PLAN" --cluster "$CLUSTER" --node-names --slurm "$JOB" --python "$PYTHON" \
    "${LAUNCH[@]}" -- "${TRAINING[@]}"
if [[ ${SUBMIT:-} ]]; then
    sbatch "$JOB"
fi
