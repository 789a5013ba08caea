"""Options of `zorse plan`, and the files that it writes: plans, and cluster files beside them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from zorse_megatron.cli.console import Errors, refusal, refuse
from zorse_megatron.cli.gpu_selection import Found
from zorse_megatron.cli.options import DEFAULT_MARGIN, Margin, one_of
from zorse_megatron.cli.perturbed import ExpertLoadText, with_expert_load
from zorse_megatron.cli.workload import Workload
from zorse_megatron.cli.workload_costs import (
    WorkloadCosts,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.read_write import NotWritten, stream_of, write_text
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import USED_GPUS
from zorse_megatron.inputs.profile import Profile
from zorse_megatron.inputs.rank_placement import stock_plan_file, used_cluster_file
from zorse_megatron.plan.plan import GradReduceDtype
from zorse_megatron.plan.plan_file import load_plan, save_plan

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
    expert_load: ExpertLoadText = None

    @property
    def may_leave_out(self) -> bool:
        """Whether the plan may be for fewer GPUs than there are; a run goes on with what it has."""
        return not self.use_all and self.from_status is None

    def costs(
        self, cluster: Cluster, *, workload: Workload, profiles: Sequence[Path | Profile]
    ) -> WorkloadCosts:
        """Return what a workload costs where such plans are searched. Raises ZorseError."""
        from zorse_megatron.planner.inputs.search_inputs import SearchEffort, SearchSpace

        costs = costs_of_workload(
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
                effort=one_of(get_args(SearchEffort), self.effort, "--effort"),
            ),
        )
        if self.expert_load is None:
            return costs
        return with_expert_load(costs, self.expert_load, may_be_list=False)


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


# The files.


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files that were written; None: that one was not."""

    plan: Path | None = None
    used_cluster: Path | None = None
    """The cluster file of the GPUs that are used, where some are not."""
    stock: Path | None = None
    """Stock's best layout beside another plan."""
    stock_cluster: Path | None = None
    """The cluster file of the GPUs that it uses, where it leaves some out."""
    error: NotWritten | None = None
    """Why not all could be written."""


@dataclass(frozen=True, kw_only=True)
class PlanOutputs:
    """Where to write what; None: do not."""

    plan: Path | None
    page: Path | None
    """The report page."""
    may_leave_out: bool
    """Whether the plan may be for fewer GPUs than there are."""
    is_part: bool
    """Whether nodes of the cluster file are lost, so that the plan is for the others."""
    with_stock: bool
    """Whether stock's best layout goes beside the plan."""

    @property
    def is_stream(self) -> bool:
        """Whether the plan goes to a stream: what is written there cannot be read again."""
        return self.plan is not None and stream_of(self.plan) is not None

    @property
    def used_cluster(self) -> Path | None:
        """Where the cluster file goes if GPUs are left out or lost."""
        if self.plan is None or self.is_stream or not self._may_have_fewer:
            return None
        return used_cluster_file(self.plan)

    @property
    def _may_have_fewer(self) -> bool:
        return self.may_leave_out or self.is_part

    @property
    def stock(self) -> Path | None:
        """Where stock's best layout goes; nowhere beside a stream."""
        if self.plan is None or self.is_stream or not self.with_stock:
            return None
        return stock_plan_file(self.plan)

    @property
    def stock_cluster(self) -> Path | None:
        """Where its cluster file goes if it leaves GPUs out."""
        return used_cluster_file(self.stock) if self.stock and self._may_have_fewer else None

    def refuse(self, inputs: list[Path | str | None]) -> None:
        """Raise before the search, which takes a while, what would go wrong after it."""
        errors = Errors()
        with errors.collect():
            self._refuse_unwritable(inputs)
        with errors.collect():
            refuse(self._foreign_problems())
        errors.raise_all()
        if self.page is not None:
            refuse_without("plots", what="zorse plan --html")

    def _refuse_unwritable(self, inputs: list[Path | str | None]) -> None:
        given = {"--out": self.plan, "--html": self.page}
        refuse_unwritable(given, inputs=inputs)
        start = f"--out {self.plan}: "
        beside = {
            f"{start}the cluster file beside it,": self.used_cluster,
            f"{start}stock's best layout beside it,": self.stock,
            f"{start}the cluster file of stock's best layout,": self.stock_cluster,
        }
        refuse_unwritable(beside | given, inputs=inputs)

    def _foreign_problems(self) -> Iterator[Problem]:
        """Yield files that would be replaced, and nobody would think of.

        Also a plan that is written to a stream: nothing can be beside it.
        """
        where = f"--out {self.plan}"
        if self.plan is not None and self.is_stream and self._may_have_fewer:
            found = "a stream, beside which there is no place for the cluster file of its GPUs"
            remedy = "Write a file." if self.is_part else "Write a file, or add --use-all."
            yield Problem(where=where, found=found, expected="a file", remedy=remedy)
        for path, what in (
            (self.used_cluster, "the cluster file of a plan that leaves GPUs out"),
            (self.stock, "stock Megatron's best layout"),
            (self.stock_cluster, "the cluster file of stock's best layout"),
        ):
            if path is not None and _is_foreign(path):
                is_cluster = ", or add --use-all" if path != self.stock else ""
                yield Problem(
                    where=where,
                    found=f"{path}, which zorse plan has not written",
                    expected=f"a place for {what}",
                    remedy=f"Choose another --out, or move that file{is_cluster}.",
                )

    def saved(self, found: Found, *, cluster: Path, left: str | None) -> Written:
        """Write plans and cluster files, as far as that can be done.

        `cluster`: the file that was read, which stays; `left`: the text of one without the nodes
        that are lost.
        """
        text, stock_text = found.cluster_text or left, found.stock_cluster_text or left
        used = self.used_cluster if text else None
        stock = self.stock if found.stock_plan else None
        stock_cluster = self.stock_cluster if stock and stock_text else None
        written = Written()
        try:
            if used and text:
                write_text(used, text)
            if self.plan is not None:
                save_plan(found.outcome.plan, self.plan)
            written = Written(plan=self.plan, used_cluster=used)
            if stock_cluster and stock_text:
                write_text(stock_cluster, stock_text)
            if stock and found.stock_plan:
                save_plan(found.stock_plan, stock)
        except NotWritten as error:
            return replace(written, plan=written.plan or error.kept, error=error)
        self._remove_left_over({used, stock, stock_cluster}, keep=cluster)
        return replace(written, stock=stock, stock_cluster=stock_cluster)

    def _remove_left_over(self, new: set[Path | None], *, keep: Path) -> None:
        """Remove what an earlier plan of that name had beside it, and this one has not."""
        if self.plan is None or self.is_stream:
            return
        stock = stock_plan_file(self.plan)
        for path in {used_cluster_file(self.plan), stock, used_cluster_file(stock)} - new:
            if path.is_file() and not path.samefile(keep) and not _is_foreign(path):
                path.unlink(missing_ok=True)


def _is_foreign(path: Path) -> bool:
    """Whether there is a file that is none of ours."""
    try:
        if path.suffix == ".json":
            return path.is_file() and not _is_plan(path)
        with path.open("rb") as file:
            return not file.read(len(USED_GPUS) + 2).endswith(USED_GPUS.encode())
    except OSError:  # none, or one that the check of outputs refuses
        return False


def _is_plan(path: Path) -> bool:
    try:
        load_plan(path)
    except ZorseError:
        return False
    return True
