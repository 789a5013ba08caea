"""The training command as every rank runs it, and the torchrun command of each node."""

import dataclasses
import os
import os.path
import shlex
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.flags.command import (
    Command,
    find_flags,
    last_values,
    read_command,
    split_script,
)
from zorse_megatron.flags.model_in_flags import job_dtype
from zorse_megatron.flags.table import flags, spelling_of
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.cluster import Cluster, Node
from zorse_megatron.launch.rank_environment import stock_environment
from zorse_megatron.plan.spans import spell

MODULE = "zorse_megatron.pretrain"
_DAMAGED = "--zorse-damaged-checkpoint"
_ADDED = ("--zorse-plan", "--zorse-cluster")
_HANDLER = "--exit-signal-handler"
_READ = (*_ADDED, _DAMAGED, "--save", "--load", _HANDLER)


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """What every rank runs."""

    words: tuple[str, ...]
    """After `python -m MODULE`, or after `python`: a script, if there is one, and flags."""
    resumes: bool
    """Whether it resumes from its own checkpoint when it is started again."""
    save: str | None = None
    """The folder of its checkpoints."""
    module: str | None = MODULE
    """None: the script itself is run, by torchrun."""
    variables: tuple[str, ...] = ()
    """Of its environment, `NAME=VALUE`."""

    @property
    def program(self) -> tuple[str, ...]:
        """All words of torchrun's after its options."""
        return (*(() if self.module is None else ("-m", self.module)), *self.words)

    def lines(self) -> list[str]:
        """Return the words for a shell: the script, then each flag with its values."""
        lines: list[str] = []
        for word in self.words:
            if word.startswith("--") or not lines:
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return lines


def training_of(given: Sequence[str], *, plan: str, cluster: str | None) -> TrainingCommand:
    """Add the plan, and to a command that saves the flags with which it goes on when requeued.

    `given`: what follows `--`; `cluster`: the file that says which rank belongs to which
    node. Raises LaunchError for flags that contradict it.
    """
    values = last_values(given, _READ)
    problems = [*_problems(given, values), *folder_problems(given)]
    if problems:
        raise LaunchError("the training command cannot be launched", problems)
    ours = ["--zorse-plan", plan]
    if cluster is not None:
        ours += ["--zorse-cluster", cluster]
    more, save = resuming_flags(given)
    if save is not None and _DAMAGED not in values:
        more += (_DAMAGED, "skip")
    return TrainingCommand(words=(*given, *ours, *more), resumes=save is not None, save=save)


def resuming_flags(given: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Megatron's flags with which a command that saves goes on when requeued, and its folder."""
    values = last_values(given, _READ)
    save = values.get("--save")
    if save is None:
        return (), None
    load = () if "--load" in values else ("--load", save)
    return (*load, *(() if _HANDLER in values else (_HANDLER,))), save


def _problems(given: Sequence[str], values: Mapping[str, str | None]) -> Iterator[Problem]:
    if not given:
        yield Problem(
            where="--",
            found="no training command",
            expected="one after --, such as: -- pretrain_gpt.py --num-layers 32",
            remedy="Give the script and Megatron's flags, without torchrun or srun.",
        )
    for flag in _ADDED:
        if flag in values:
            yield Problem(
                where=flag,
                found="it in the training command",
                expected="zorse launch to add it",
                remedy="Leave it out.",
            )


def folder_problems(given: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with where a command saves and loads."""
    values = last_values(given, _READ)
    if "--save" not in values:
        return
    saves, loads = values["--save"], values.get("--load", values["--save"])
    if not saves:
        yield Problem(
            where="--save",
            found='"" after it',
            expected="a directory",
            remedy="Such as --save checkpoints.",
        )
    # Whether they lead to one folder, as the ranks themselves ask before they load.
    elif os.path.realpath(saves) != os.path.realpath(loads or ""):
        yield Problem(
            where="--load",
            found=f"{loads or ''}, while --save says {saves}",
            expected="the same directory: a restarted job resumes from what it saved",
            remedy="Leave --load out; to start from another checkpoint, give it as "
            "--pretrained-checkpoint.",
        )


# Unmodified Megatron in a layout: the user's command with the layout's flags, and its nodes.


_LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "expert_model_parallel_size",
    *("pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank"),
    *("num_layers_per_virtual_pipeline_stage", "microbatch_group_size_per_vp_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("micro_batch_size", "use_distributed_optimizer", "use_tp_pp_dp_mapping"),
    *("overlap_grad_reduce", "overlap_param_gather"),
    *("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush"),
    *("recompute_granularity", "recompute_activations"),
    *("recompute_method", "recompute_num_layers"),
)
"""Arguments that a layout decides."""


def without_layout(
    given: Sequence[str], layout: Sequence[str], *, is_started: bool = True
) -> tuple[str, ...]:
    """Return the command without the flags that a layout decides.

    `layout`: its flags; `is_started`: whether unmodified Megatron is to run the command. Raises
    LaunchError with all that contradict the layout, and for what it cannot run; not for another
    micro-batch size, as under a plan (`replaced_sizes`).
    """
    command, wanted = read_command(given), read_command(layout).args
    problems = [*_unknown_to_stock(given)] if is_started else []
    problems += _contradictions(command, wanted)
    if problems:
        raise LaunchError("the training command does not fit the layout", problems)
    return stripped_of_layout(given)


def stripped_of_layout(given: Sequence[str]) -> tuple[str, ...]:
    """Return the command without the flags that a layout decides, whatever they say."""
    spelt = {
        spelling: 0 if flag.kind != "store" else "?"
        for flag in flags()
        if flag.name in _LAYOUT
        for spelling in flag.spellings
    }
    return find_flags(given, spelt)[1]  # type: ignore[arg-type]


def replaced_sizes(given: Sequence[str], layout: Sequence[str]) -> tuple[str, ...]:
    """A note on the micro-batch size of a command, which Megatron asks for: the layout's counts."""
    found, wanted = (read_command(each).args.micro_batch_size for each in (given, layout))
    if found in {None, wanted}:
        return ()
    return (f"--micro-batch-size {found} becomes {wanted}, the layout's",)


def refuse_other_dtype(given: Sequence[str], dtype: ComputeDtype | None) -> None:
    """Raise LaunchError where a command says another type than the layout was made for."""
    said = job_dtype(read_command(given).args)
    if dtype is None or dtype == said:
        return
    wanted = "neither --fp16 nor --bf16" if dtype == "fp32" else f"--{dtype}"
    raise LaunchError.of(
        "the training command does not fit the layout",
        where="--fp16, --bf16",
        found=f"--{said}" if said != "fp32" else "neither",
        expected=f"{wanted}, as the layout was made for (compute_dtype)",
        remedy="Stock Megatron has one type for the job, and the command says which one.",
    )


def stock_training_of(given: Sequence[str], layout: Sequence[str], tensor: int) -> TrainingCommand:
    """Add the layout's flags, and those with which a job that saves goes on when requeued.

    `given`: what `without_layout` returns; `tensor`: tensor-parallel ranks. Raises LaunchError.
    """
    problems = list(folder_problems(given))
    if problems:
        raise LaunchError("the training command cannot be launched", problems)
    more, save = resuming_flags(given)
    needed = stock_environment() if tensor > 1 else {}
    return TrainingCommand(
        words=(*given, *layout, *more),
        resumes=save is not None,
        save=save,
        module=None,
        variables=tuple(f"{name}={value}" for name, value in needed.items()),
    )


def in_order(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """Return the cluster with its nodes, and the GPUs of each, in the order of stock's ranks.

    `ranks`: rank of stock's job -> rank of the cluster; those of a node follow each other.
    """
    nodes: list[Node] = []
    for _, some in groupby(ranks, key=lambda rank: cluster.node_of_rank(rank).first_rank):
        its = list(some)
        first_rank = sum(len(each.gpu_kinds) for each in nodes)
        nodes.append(cluster.node_of_rank(its[0]).with_gpus(its, first_rank=first_rank))
    return dataclasses.replace(cluster, nodes=tuple(nodes))


def _unknown_to_stock(given: Sequence[str]) -> Iterator[Problem]:
    if split_script(given)[0] is None:
        yield Problem(
            where="--",
            found="no script at the start of the training command",
            expected="Megatron-LM's own, or yours: the built-in GPT entry needs this package",
            remedy="Such as: -- pretrain_gpt.py --num-layers 32",
        )
    for word in dict.fromkeys(word.partition("=")[0] for word in given):
        if word.startswith("--zorse-"):
            yield Problem(
                where=word,
                found="it in the training command",
                expected="flags of unmodified Megatron",
                remedy="Leave it out.",
            )


def _contradictions(command: Command, wanted: Namespace) -> Iterator[Problem]:
    # `--recompute-activations` is another word for the granularity "selective".
    selective = wanted.recompute_granularity == "selective"
    also = Namespace(**{**vars(wanted), "recompute_activations": selective})
    for name in _LAYOUT:
        found, expected = getattr(command.args, name), getattr(also, name)
        if name in command.given and found != expected and name != "micro_batch_size":
            yield Problem(
                where=spelling_of(name),
                found="it" if isinstance(found, bool) else f"{found}",
                expected=f"{_said(found, expected)}, as the layout has",
                remedy="Leave it out: zorse launch adds the layout's flags.",
            )


def _said(found: Any, expected: Any) -> str:
    return "no such flag" if isinstance(found, bool) or expected is None else f"{expected}"


# The torchrun command of each node.
#
# torchrun gives ranks out in the order of --node-rank, and a node as many as its --nproc-per-node
# says: the numbers need not be equal (`_assign_worker_ranks` in torch's
# `distributed/elastic/agent/server/api.py`, unless TORCH_ELASTIC_WORKER_IDENTICAL is set).


DEFAULT_PORT = 29500
MAX_RESTARTS = 100
"""Of torchrun's; before that `zorse join` gives up a job that does not get further."""
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""A port of its own for each round, so that nobody meets those of an earlier one."""


def torchrun_lines(
    cluster: Cluster,
    training: TrainingCommand,
    *,
    master_address: str | None,
    master_port: int,
) -> str:
    """Return a comment and a command for each node; `master_address`: of the first one.

    Left out it is the first node's name, and `localhost` where there is no other node to find it:
    then the name in the cluster file may be anybody's invention.
    """
    meets = ("--master-addr", _address(cluster, master_address), "--master-port", str(master_port))
    return "\n".join(
        _lines(
            node,
            *(*training.variables, "torchrun"),
            *("--nnodes", str(len(cluster.nodes)), "--node-rank", str(number)),
            *("--nproc-per-node", str(len(node.gpu_kinds)), *meets, *training.program),
        )
        for number, node in enumerate(cluster.nodes)
    )


def elastic_torchrun_lines(
    cluster: Cluster,
    words: Sequence[str],
    *,
    name: str,
    min_gpus: int,
    master_address: str | None,
    master_port: int,
) -> str:
    """Return the same for nodes that may go and come; `words`: of the `zorse join` of each.

    `name`: of the run; `min_gpus`: with fewer it does not start.
    """
    most = f"{fewest_nodes(cluster, min_gpus)}:{len(cluster.nodes)}"
    meets = ("--rdzv-endpoint", f"{_address(cluster, master_address)}:{master_port}")
    return "\n".join(
        _lines(
            node,
            *(OWN_STORES, "torchrun", "--nnodes", most),
            *("--nproc-per-node", str(len(node.gpu_kinds)), "--max-restarts", str(MAX_RESTARTS)),
            *("--rdzv-backend", "c10d", "--rdzv-id", name, *meets),
            *("-m", "zorse_megatron", "join", *words),
        )
        for node in cluster.nodes
    )


def fewest_nodes(cluster: Cluster, min_gpus: int) -> int:
    """With fewer nodes than this there cannot be so many GPUs."""
    largest_first = sorted((len(node.gpu_kinds) for node in cluster.nodes), reverse=True)
    return 1 + bisect_left(list(accumulate(largest_first)), min_gpus)


def _address(cluster: Cluster, given: str | None) -> str:
    alone = len(cluster.nodes) == 1
    return given or ("localhost" if alone else cluster.nodes[0].name)


def described(node: Node) -> str:
    """Ranks and GPUs of a node, for people."""
    kinds = dict.fromkeys(node.gpu_kinds)
    gpus = ", ".join(f"{node.gpu_kinds.count(kind)} {kind}" for kind in kinds)
    spelled = spell([(node.ranks.start, node.ranks.stop)])
    return f"{'rank' if len(node.ranks) == 1 else 'ranks'} {spelled}, {gpus}"


def _lines(node: Node, *words: str) -> str:
    """Say what the node is, and the command; local ranks count GPUs as the cluster file does."""
    variables = ["CUDA_DEVICE_ORDER=PCI_BUS_ID"]
    if node.gpu_numbers is not None:
        variables.append(f"CUDA_VISIBLE_DEVICES={','.join(map(str, node.gpu_numbers))}")
    name = " ".join(node.name.split())
    return f"# On {name}: {described(node)}\n{shlex.join([*variables, *words])}\n"
