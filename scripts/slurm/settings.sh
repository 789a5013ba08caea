# What the jobs in this directory share; they read it from where sbatch was called. Copy it and the
# jobs there, and change it.
# shellcheck shell=bash disable=SC2034

PYTHON=${PYTHON:-python}        # the interpreter that has zorse-megatron, on every node
CLUSTER=cluster.yaml            # written by discover.sh
PROFILE=profile.json            # written by discover.sh
PLAN=plan.json                  # written by plan.sh
JOB=train.sh                    # written by plan.sh: the training job
COMPARED=compared               # directory, written by compare.sh

# Your training command, without srun and torchrun. With --save the job is requeued and goes on.
TRAINING=(
    pretrain_gpt.py
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --seq-length 2048 --max-position-embeddings 2048
    --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
    --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 3e-4 --fp16
    --eval-interval 500
    --save checkpoints --save-interval 100
)

DISCOVER=()                     # options of zorse discover
MEASURE=()                      # options of zorse profile measure
PLANNING=()                     # options of zorse plan

# For zorse launch: KIND=PARTITION, or one partition for all; options of sbatch.
LAUNCH=(
    --partition A100-40=a100 --partition T4=t4
    --sbatch time=24:00:00
)

zorse() { "$PYTHON" -m zorse_megatron "$@"; }
