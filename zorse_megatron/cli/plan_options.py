"""Options of `zorse plan`, and what a run's status says to them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from zorse_megatron.cli.console import refusal
from zorse_megatron.cli.options import DEFAULT_MARGIN, Margin, one_of
from zorse_megatron.cli.workload import Workload
from zorse_megatron.cli.workload_costs import (
    WorkloadCosts,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.profile import Profile
from zorse_megatron.plan.plan import GradReduceDtype

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Strategy


FromStatus = Annotated[
    Path | None,
    typer.Option(
        "--from-status",
        metavar="DIR",
        help="Plan at the speeds that GPUs have in the run with --zorse-status DIR, and say what "
        "a move to the plan would gain.",
    ),
]
_TOKENS = re.compile(r"(\d{1,20}(?:\.\d{0,20})?(?:[eE]\+?\d{1,2})?)\s*([kKmMbBtT]?)")
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST_TOKENS = 1e18

UseAll = Annotated[
    bool,
    typer.Option(
        "--use-all",
        help="Use all GPUs. Default: those that slow the others are left out, as spares, and the "
        "cluster file of the others is written beside the plan.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Which plans are searched, and for which GPUs."""

    strategy: Annotated[
        str, typer.Option(help="zorse, or a baseline: stock, zorse-paper or cephalo.")
    ] = "zorse"
    grad_reduce_dtype: Annotated[
        str | None,
        typer.Option(
            "--grad-reduce-dtype",
            help="Communication dtype for gradients, bf16 or fp16, used by the groups it makes "
            "faster. Gradients are still summed in fp32, but sending rounds them. Default: none.",
        ),
    ] = None
    max_tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--max-tp",
            min=1,
            help="Most ranks of a tensor-parallel group; 1: no TP groups. Default: a node's GPUs.",
        ),
    ] = None
    tp_across_nodes: Annotated[
        bool,
        typer.Option(
            "--tp-across-nodes",
            help="Let tensor-parallel groups have ranks on two nodes.",
        ),
    ] = False
    even_tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--even-tp",
            help="Give the ranks of a tensor-parallel group even TP shards only.",
        ),
    ] = False
    one_piece_backward: Annotated[
        bool,
        typer.Option(
            "--no-split-backward",
            help="Let no group compute weight gradients apart from backwards, which needs "
            "Transformer Engine 2.3, or local layers with --no-gradient-accumulation-fusion.",
        ),
    ] = False
    effort: Annotated[
        str,
        typer.Option(
            help="How far the search goes on from its fastest plans, step by step, by other "
            "placements, orders, groups and settings: normal, or high, which takes a minute or two "
            "more."
        ),
    ] = "normal"
    offload_activations: Annotated[
        bool,
        typer.Option(
            "--activation-offload",
            help="Search plans, too, that keep activations in host memory without recomputing all "
            "layers. Takes about as long again.",
        ),
    ] = False
    from_status: FromStatus = None
    use_all: UseAll = False
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE",
            help="A node of the cluster file that is lost; repeatable. The cluster file of those "
            "that are left is written beside the plan.",
        ),
    ] = None
    margin: Margin = DEFAULT_MARGIN

    @property
    def may_leave_out(self) -> bool:
        """Whether the plan may be for fewer GPUs than there are; a run goes on with what it has."""
        return not self.use_all and self.from_status is None

    def costs(
        self, cluster: Cluster, *, workload: Workload, profiles: Sequence[Path | Profile]
    ) -> WorkloadCosts:
        """Return what a workload costs where such plans are searched. Raises ZorseError."""
        from zorse_megatron.planner.inputs.search_inputs import SearchSpace

        return costs_of_workload(
            cluster,
            workload,
            profiles,
            global_batch_size=needed_batch_size(workload),
            margin=self.margin,
            space=SearchSpace(
                max_tensor_parallel=self.max_tensor_parallel,
                tp_across_nodes=self.tp_across_nodes,
                uneven_tp_shards=not self.even_tensor_parallel,
                grad_reduce_dtype=grad_reduce_dtype_named(self.grad_reduce_dtype),
                split_backward=not self.one_piece_backward,
                offload_activations=self.offload_activations,
                effort=self.effort,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is written and shown of a plan."""

    out: Annotated[
        Path | None, typer.Option("--out", metavar="PLAN", help="Write the plan to this file.")
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="HTML",
            help="Write a report page: timeline, memory, stock's best layouts, and what one more "
            "GPU would bring (several more searches).",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Say how many days training on so many tokens takes: 300B, 1T, 1.5e12.",
        ),
    ] = None
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Print the whole plan, its reasons, rejected plans, and what the times rest on.",
        ),
    ] = False


def strategy_named(name: str) -> "Strategy":
    """Return the strategy of that name. Raises CommandError for another text."""
    from zorse_megatron.planner.outcome import STRATEGIES

    return one_of(STRATEGIES, name, "--strategy")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """How many tokens to train on."""

    count: float
    said: str
    """As it was asked."""


def tokens_named(text: str | None) -> Tokens | None:
    """Return how many tokens that is; None: nothing was said. Raises CommandError.

    >>> tokens_named("300B").count, tokens_named("1.5e12").count
    (300000000000.0, 1500000000000.0)
    """
    if text is None:
        return None
    match = _TOKENS.fullmatch(text.strip())
    count = float(match[1]) * _THOUSANDS[match[2].upper()] if match else 0.0
    if 1 <= count <= _MOST_TOKENS:
        return Tokens(count=count, said=text.strip())
    raise refusal(
        "--tokens",
        f'"{text}"',
        f"a number of tokens from 1 to {_MOST_TOKENS:.0e}, with K, M, B or T or without",
        "Such as 300B, 1T or 1.5e12.",
    )


def grad_reduce_dtype_named(name: str | None) -> GradReduceDtype | None:
    """Return the type of that name. Raises CommandError for another text."""
    if name is None:
        return None
    remedy = "Omit it to send gradients in the dtype they are accumulated in."
    return one_of(get_args(GradReduceDtype), name, "--grad-reduce-dtype", remedy)
