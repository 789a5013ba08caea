"""How a batch script starts ranks by torchrun, once on each node: stock Megatron's, elastic jobs'.

Slurm numbers tasks component by component, and node by node in each; with one task on each node
that is the node's rank. torchrun needs a time of its own to let ranks save: it ends them after 30 s
(`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`).
"""

from collections.abc import Sequence

from zorse_megatron.launch.components import JobComponent
from zorse_megatron.launch.torchrun_lines import MAX_RESTARTS

TASK = r'bash -c "$(declare -p GPUS PYTHON); $(declare -f on_node); on_node \"\$@\"" bash'
"""Of srun, followed by script and flags."""
_CPUS = "cpus-per-task="
_ON_NODE = """\
GPUS=({gpus})    # numbers of each node's GPUs among those that Slurm gives, in the order of ranks
export MASTER_ADDR=${{MASTER_ADDR:-$SLURMD_NODENAME}}
export MASTER_PORT=${{MASTER_PORT:-$((20000 + 7 * SLURM_JOB_ID % 10000))}}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{save_s}}}
on_node() {{
    local mine given at
    IFS=, read -ra mine <<<"${{GPUS[SLURM_PROCID]}}"
    IFS=, read -ra given <<<"${{CUDA_VISIBLE_DEVICES-}}"
    for at in "${{!mine[@]}}"; do mine[at]=${{given[mine[at]]-${{mine[at]}}}}; done
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${{mine[*]}}")
    export CUDA_VISIBLE_DEVICES
    exec "$PYTHON" -m torch.distributed.run {nodes} \\
        --nproc-per-node "${{#mine[@]}}" {meets} "$@"
}}
"""
_ALL_NODES = (
    '--nnodes "${#GPUS[@]}" --node-rank "$SLURM_PROCID"',
    '--master-addr "$MASTER_ADDR" \\\n        --master-port "$MASTER_PORT"',
)
_MEET = (
    '--rdzv-backend c10d --rdzv-id "$RUN" \\\n        '
    '--rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-conf "is_host=$((SLURM_PROCID == 0))"'
)


def node_starter(
    components: Sequence[JobComponent], *, save_s: int, fewest_nodes: int | None
) -> str:
    """Return the function that each node runs. `save_s`: how long ranks may take to save.

    `fewest_nodes`: of an elastic job, which goes on with so many; None: all are needed.
    """
    numbers = (node.numbers for component in components for node in component.nodes)
    gpus = " ".join(",".join(map(str, each)) for each in numbers)
    nodes, meets = _ALL_NODES
    if fewest_nodes is not None:
        most = f'{fewest_nodes}:"${{#GPUS[@]}}"'
        nodes, meets = f"--nnodes {most} --max-restarts {MAX_RESTARTS}", _MEET
    return _ON_NODE.format(gpus=gpus, save_s=save_s, nodes=nodes, meets=meets)


def asked_for_node(component: JobComponent, more: Sequence[str]) -> list[str]:
    """Return sbatch's options for one task on each node, which has the cores of all its ranks.

    `more`: further ones of the user's, of which `cpus-per-task` is for a rank. A node that has more
    GPUs than are used is asked for whole, so that their numbers hold.
    """
    node = component.nodes[0]
    gpus = max(node.numbers) + 1
    whole = ["--exclusive"] if gpus > len(node.numbers) else []
    cores = [text.removeprefix(_CPUS) for text in more if text.startswith(_CPUS)]
    if cores or not any(text.startswith("cpus-per-gpu=") for text in more):
        each, ranks = (cores or ["1"])[-1], len(node.gpu_kinds)
        whole.append(f"--{_CPUS}{int(each) * ranks if each.isdecimal() else each}")
    return ["--ntasks-per-node=1", f"--gpus-per-node={gpus}", *whole]
