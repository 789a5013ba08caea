"""The files that `zorse plan` writes, its page among them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import CommandError, Errors, gib, print_plain, progress_bar
from zorse_megatron.cli.gpu_selection import Found, gpus_of, spares
from zorse_megatron.cli.plan_answer import Answer, Written, notes_on
from zorse_megatron.cli.simulated import capacities_bytes, simulated, types_of
from zorse_megatron.cli.tables import memory_saved_by, plan_line
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.read_write import NotWritten, stream_of, write_text
from zorse_megatron.files.wording import duration, figure, number_of, percent
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.inputs.cluster_yaml import USED_GPUS
from zorse_megatron.inputs.rank_placement import stock_plan_file, used_cluster_file
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import load_plan, save_plan
from zorse_megatron.plan.spans import spell

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import Stock, StockAtBest, StockLayout
    from zorse_megatron.planner.explanation import Explanation
    from zorse_megatron.planner.other_searches import Replans
    from zorse_megatron.planner.outcome import Outcome
    from zorse_megatron.plots.report_page import Card, Picture, PlanPage, ReplanRow, StrategyRow


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
        return used_cluster_file(self.plan) if self.plan and self._may_have_fewer else None

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
            self._refuse_foreign()
        errors.raise_all()
        if self.page is not None:
            refuse_without("plots", what="zorse plan --html")

    def _refuse_unwritable(self, inputs: list[Path | str | None]) -> None:
        given = {"--out": self.plan, "--html": self.page}
        refuse_unwritable(given, inputs=inputs)
        if self.plan is not None and not self.is_stream:
            start = f"--out {self.plan}: "
            beside = {
                f"{start}the cluster file beside it,": self.used_cluster,
                f"{start}stock's best layout beside it,": self.stock,
                f"{start}the cluster file of stock's best layout,": self.stock_cluster,
            }
            refuse_unwritable(beside | given, inputs=inputs)

    def _refuse_foreign(self) -> None:
        """Raise CommandError for files that would be replaced, and nobody would think of.

        Also for a plan that is written to a stream: nothing can be beside it.
        """
        if self.plan is None:
            return
        where, problems = f"--out {self.plan}", []
        if self.is_stream:
            if self._may_have_fewer:
                found = "a stream, beside which there is no place for the cluster file of its GPUs"
                remedy = "Write a file." if self.is_part else "Write a file, or add --use-all."
                problems.append(Problem(where=where, found=found, expected="a file", remedy=remedy))
        else:
            for path, what in (
                (self.used_cluster, "the cluster file of a plan that leaves GPUs out"),
                (self.stock, "stock Megatron's best layout"),
                (self.stock_cluster, "the cluster file of stock's best layout"),
            ):
                if path is not None and _is_foreign(path):
                    is_cluster = ", or add --use-all" if path != self.stock else ""
                    problems.append(
                        Problem(
                            where=where,
                            found=f"{path}, which zorse plan has not written",
                            expected=f"a place for {what}",
                            remedy=f"Choose another --out, or move that file{is_cluster}.",
                        )
                    )
        if problems:
            raise CommandError("the command cannot be run", problems)

    def saved(
        self, found: Found, *, cluster: Path, left: str | None
    ) -> tuple[Written, NotWritten | None]:
        """Write plans and cluster files; also return why one could not be.

        The plan is shown in any case. `cluster`: the file that was read, which stays; `left`: the
        text of one without the nodes that are lost.
        """
        selected, stock = found.selected, found.stock
        text = (selected and selected.cluster_text) or left
        stock_text = (stock and stock.cluster_text) or left
        used = self.used_cluster if text else None
        beside = self.stock if stock and stock.plan else None
        stock_cluster = self.stock_cluster if beside and stock_text else None
        try:
            if used and text:
                write_text(used, text)
            if self.plan is not None:
                save_plan(found.outcome.plan, self.plan)
        except NotWritten as error:
            return Written(plan=error.kept), error
        written = Written(plan=self.plan, used_cluster=used)
        try:
            if stock_cluster and stock_text:
                write_text(stock_cluster, stock_text)
            if beside and stock and stock.plan:
                save_plan(stock.plan, beside)
        except NotWritten as error:
            return written, error
        self._remove_left_over({used, beside, stock_cluster}, keep=cluster)
        return replace(written, stock=beside, stock_cluster=stock_cluster), None

    def _remove_left_over(self, new: set[Path | None], *, keep: Path) -> None:
        """Remove what an earlier plan of that name had beside it, and this one has not."""
        if self.plan is None or self.is_stream:
            return
        stock = stock_plan_file(self.plan)
        for path in {used_cluster_file(self.plan), stock, used_cluster_file(stock)} - new:
            if path.is_file() and not path.samefile(keep) and not _is_foreign(path):
                path.unlink(missing_ok=True)

    def draw(self, answer: Answer, *, is_silent: bool) -> None:
        """Draw after the plan, which is written and shown by then."""
        if self.page is not None:
            write_text(self.page, plan_page(answer, shows_progress=not is_silent))
            if not is_silent:
                print_plain(f"written: {self.page}")


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


# `zorse plan --html`: plan, reasons, stock's best layouts and gains of more GPUs on one page.


_HEADINGS = (
    *("Group", "GPUs", "Layers", "Micro-batches", "Memory saved by"),
    *("Busy", "Communication", "Waiting"),
)


def plan_page(answer: Answer, *, shows_progress: bool) -> str:
    """Return the page. Searches once more for each kind of GPU, below 256 of them."""
    from zorse_megatron.planner.explain import explain
    from zorse_megatron.planner.other_searches import replan

    inputs, outcome = answer.costs.inputs, answer.outcome
    with progress_bar(wanted=shows_progress, title="page") as on_progress:
        replans = replan(inputs, found_s=outcome.iteration_s, on_progress=on_progress)
    explanation = answer.explanation or explain(inputs, outcome.plan)
    return _page(answer, explanation, replans).html()


def _page(answer: Answer, explanation: "Explanation", replans: "Replans | None") -> "PlanPage":
    from zorse_megatron.planner.other_searches import MOST_GPUS
    from zorse_megatron.plots.report_page import PlanPage

    costs, outcome = answer.costs, answer.outcome
    plan, inputs, counts = outcome.plan, costs.inputs, outcome.considered
    selected = answer.selected
    left_out = f" ({spares(selected)})" if selected is not None and selected.left_out else ""
    return PlanPage(
        title=f"{costs.workload.model.name} on {costs.cluster.name or 'the cluster'}",
        subtitle=(
            f"{gpus_of(costs.cluster, range(inputs.world_size))}{left_out}; "
            f"{inputs.global_batch_size} samples of {inputs.sequence_length:,} tokens an "
            f"iteration, {types_of(plan, costs)}"
        ),
        cards=tuple(_cards(answer, explanation)),
        contest=tuple(_contest(answer)),
        plan_line=plan_line(plan),
        group_headings=_HEADINGS,
        groups=tuple(_groups(plan, explanation)),
        reasons=answer.sentences,
        pictures=tuple(_pictures(costs, plan)),
        replans=tuple(_replan_rows(replans)),
        no_replans=(
            f"Not searched: from {MOST_GPUS} GPUs on, each search takes too long."
            if replans is None
            else "No larger cluster has a plan that fits."
        ),
        rejected=tuple((each.what, each.why) for each in outcome.rejected),
        considered=(
            f"The best of each other structure, among {counts.groupings:,} groupings, "
            f"{counts.estimated:,} candidates estimated and {counts.simulated:,} simulated."
        ),
        notes=notes_on(costs, outcome),
        footer=(
            "Predicted by zorse-megatron's simulator, which executes the ranks' own lists of "
            "actions. Not measured."
        ),
    )


def _cards(answer: Answer, explanation: "Explanation") -> Iterator["Card"]:
    from zorse_megatron.plots.report_page import Card

    outcome, bar = answer.outcome, answer.error_bar
    yield Card(
        label="One iteration",
        value=duration(outcome.iteration_s),
        note=f"{figure(outcome.tokens_per_s)} tokens/s, ± {percent(bar.share)} ({bar.basis})",
    )
    best = None if answer.stock is None else answer.stock.best.fitting
    why = "not computed for so many GPUs" if answer.stock is None else "none fits"
    yield Card(
        label="Against stock's best layout",
        value="-" if best is None else f"{figure(best.iteration_s / outcome.iteration_s)} x",
        note=why if best is None else f"it takes {duration(best.iteration_s)}",
    )
    yield Card(
        label="Of the upper bound on throughput",
        value=percent(outcome.efficiency),
        note=f"no plan takes less than {duration(outcome.bound_s)}",
    )
    tightest = min(explanation.headroom, key=lambda each: each.free_bytes)
    yield Card(
        label="Fullest GPU",
        value=percent(outcome.peak_memory_fraction),
        note=f"{gib(tightest.free_bytes)} left on rank {tightest.rank} ({tightest.kind})",
    )


def _contest(answer: Answer) -> Iterator["StrategyRow"]:
    """Both layouts of stock on any GPUs of the whole cluster, and the plan."""
    from zorse_megatron.plots.report_page import StrategyRow

    outcome, stocks = answer.outcome, () if answer.stock is None else _stocks(answer.stock)
    fitting = [stock.fitting for _, stock in stocks if stock.fitting is not None]
    most = max(outcome.tokens_per_s, *(each.tokens_per_s for each in fitting), 1.0)

    def row(name: str, layout: str, found: "Outcome | StockLayout") -> "StrategyRow":
        return StrategyRow(
            name=name,
            layout=layout,
            iteration=duration(found.iteration_s),
            tokens=figure(found.tokens_per_s),
            percent=round(100 * found.tokens_per_s / most, 1),
            is_ours=found is outcome,
        )

    for name, stock in stocks:
        layout = stock.fitting
        if layout is None:
            yield StrategyRow(name=name, layout="", reason=stock.reason)
        else:
            yield row(name, layout.description, layout)
    gpus = gpus_of(answer.costs.cluster, range(outcome.plan.world_size))
    groups = number_of(len(outcome.plan.groups), "group")
    yield row(outcome.strategy, f"{gpus}: {groups}, {outcome.plan.schedule.name}", outcome)


def _stocks(stock: "StockAtBest") -> tuple[tuple[str, "Stock"], ...]:
    return (("stock, best even layout", stock.even), ("stock, best layout", stock.best))


def _groups(plan: Plan, explanation: "Explanation") -> Iterator[tuple[str, ...]]:
    for load in explanation.loads:
        group = plan.groups[load.group]
        runs = dict.fromkeys(
            f"{each.num_microbatches} x {each.micro_batch_size}" for each in group.replicas
        )
        layers = spell([plan.chunks[chunk].layers for chunk in plan.chunks_of_group(load.group)])
        yield (
            f"{load.group} {group.name or ''}".strip(),
            ", ".join(f"{count} {kind}" for kind, count in load.kinds),
            f"{load.num_layers}: {layers}",
            f"{', '.join(runs)} samples",
            "; ".join(
                dict.fromkeys(memory_saved_by(group, each) or "nothing" for each in group.replicas)
            ),
            *map(percent, (load.busy, load.communication, load.waiting)),
        )


def _pictures(costs: WorkloadCosts, plan: Plan) -> Iterator["Picture"]:
    from zorse_megatron.plots.figures import draw_memory
    from zorse_megatron.plots.gantt import draw_timeline
    from zorse_megatron.plots.report_page import Picture

    result = simulated(plan, costs, source="the plan")
    with TemporaryDirectory(prefix="zorse-page-") as directory:
        timeline = draw_timeline(
            Path(directory) / "timeline.png", plan=plan, result=result, title=""
        )
        yield Picture(
            title="One iteration",
            hint="Each GPU's timeline, made of the actions that its rank executes.",
            png=timeline.read_bytes(),
        )
        memory = draw_memory(
            Path(directory) / "memory.png",
            plan=plan,
            result=result,
            capacity_bytes=capacities_bytes(costs.cluster),
            title="",
        )
        yield Picture(
            title="Memory",
            hint="Peak memory of each GPU, against its capacity.",
            png=memory.read_bytes(),
        )


def _replan_rows(replans: "Replans | None") -> Iterator["ReplanRow"]:
    from zorse_megatron.planner.explanation import faster
    from zorse_megatron.plots.report_page import ReplanRow

    for more in replans.one_more if replans else ():
        yield ReplanRow(
            what=f"one more {more.kind} in node {more.node}",
            iteration=duration(more.iteration_s),
            gain=faster(more.speedup),
        )
