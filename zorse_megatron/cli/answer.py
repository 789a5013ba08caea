"""The answer of `zorse plan`: what is known of a plan, and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.gpu_selection import Found
from zorse_megatron.cli.next_command import NextCommand
from zorse_megatron.cli.observed_run import ObservedRun
from zorse_megatron.cli.plan_options import Tokens
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import PlanError
from zorse_megatron.files.strict import plain
from zorse_megatron.flags.torch_builds import build_notes
from zorse_megatron.launch.elastic.replan import NodesLeft
from zorse_megatron.schedule.lower import refuse_unsupported

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import Stock, StockAtBest, StockLayout
    from zorse_megatron.planner.explain import ErrorBar
    from zorse_megatron.planner.explanation import Explanation
    from zorse_megatron.planner.outcome import Outcome


_MAX_REASONS = 3
_DAY_S = 86_400.0
# Beyond it, explaining takes as long as searching; `zorse explain` still does it.
MOST_EXPLAINED = 512
_WORTH_A_PLUGIN = 1.03
"""Stock Megatron is recommended where its best layout takes less than so many times as long."""


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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and what is known of it."""

    found: Found
    explanation: "Explanation | None"
    """None: there are too many GPUs."""
    error_bar: "ErrorBar"
    tokens: Tokens | None
    """How many to train on, if that is asked."""
    written: Written
    left: NodesLeft | None
    """Nodes of the cluster file that are not lost; None: all of them."""
    run: ObservedRun | None
    """That the plan is to go on with."""
    next_command: NextCommand | None = None

    @property
    def outcome(self) -> "Outcome":
        """The plan, as it was found."""
        return self.found.outcome

    @property
    def costs(self) -> WorkloadCosts:
        """On the GPUs that are used."""
        return self.found.costs

    @property
    def stock(self) -> "StockAtBest | None":
        """Stock Megatron on the whole cluster; None: there are too many GPUs, or a run goes on."""
        return None if self.found.stock is None else self.found.stock.at_best

    @property
    def num_gpus(self) -> int:
        """Those of the whole cluster."""
        return self.found.num_gpus

    @property
    def best_stock(self) -> "StockLayout | None":
        """Stock's best layout; None where none fits, or none was searched."""
        return None if self.stock is None else self.stock.best.fitting

    @property
    def is_stock(self) -> bool:
        """Whether the plan is a layout for unmodified Megatron."""
        return self.outcome.strategy == "stock"

    @property
    def iteration_s(self) -> float:
        """By what runs the plan: unmodified Megatron, or this package's runtime."""
        if self.is_stock and self.best_stock is not None:
            return self.best_stock.iteration_s
        return self.outcome.iteration_s

    @property
    def tokens_per_s(self) -> float:
        """As `iteration_s`."""
        return self.outcome.tokens_per_s * self.outcome.iteration_s / self.iteration_s

    @property
    def recommends_stock(self) -> bool:
        """Whether stock's best layout is hardly slower than the best plan."""
        stock, is_best = self.best_stock, self.outcome.strategy == "zorse"
        return (
            is_best and stock is not None and stock.iteration_s < _WORTH_A_PLUGIN * self.iteration_s
        )

    @property
    def cannot_train(self) -> str | None:
        """Why this version cannot train the plan; None where it can."""
        try:
            refuse_unsupported(self.outcome.plan)
        except PlanError as error:
            reasons = [f"{each.where} has {each.found}" for each in error.problems]
            more = f" and {len(reasons) - _MAX_REASONS} more" * (len(reasons) > _MAX_REASONS)
            listed = ", ".join(dict.fromkeys(reasons[:_MAX_REASONS]))
            return f"this version cannot train this plan yet: {listed}{more}"
        return None

    def days(self, factor: float = 1.0) -> float:
        """How long `tokens` take if an iteration takes so many times what is predicted."""
        assert self.tokens is not None
        return factor * self.tokens.count / self.tokens_per_s / _DAY_S

    @property
    def sentences(self) -> tuple[str, ...]:
        """Why the plan takes as long as it does."""
        return () if self.explanation is None else self.explanation.sentences

    @property
    def notes(self) -> list[str]:
        """What was chosen and assumed, each thing once."""
        cannot = [self.cannot_train] if self.cannot_train else []
        builds = build_notes(list(self.costs.cluster.kinds))
        return list(dict.fromkeys((*cannot, *self.costs.notes, *self.outcome.notes, *builds)))

    @cached_property
    def move(self) -> dict[str, Any] | None:
        """What the run gains by going on under the plan; None: there is no run."""
        return None if self.run is None else self.run.move_to(self.outcome, self.written.plan)


def answer_of(
    found: Found,
    *,
    tokens: Tokens | None,
    written: Written,
    left: NodesLeft | None,
    run: ObservedRun | None,
) -> Answer:
    """Explain what was found."""
    from zorse_megatron.planner.explain import error_bar, explain

    plan, inputs = found.outcome.plan, found.costs.inputs
    return Answer(
        found=found,
        explanation=explain(inputs, plan) if plan.world_size <= MOST_EXPLAINED else None,
        error_bar=error_bar(inputs, num_groups=len(plan.groups)),
        tokens=tokens,
        written=written,
        left=left,
        run=run,
    )


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """Return the same as JSON values, in full precision."""
    found, outcome, costs, bar = answer.found, answer.outcome, answer.costs, answer.error_bar
    return {
        "strategy": outcome.strategy,
        "iteration_s": answer.iteration_s,
        "iteration_between_s": list(bar.between(answer.iteration_s)),
        "tokens_per_s": answer.tokens_per_s,
        "runtime_iteration_s": outcome.iteration_s,
        "error_share": bar.share,
        "times_rest_on": bar.basis,
        "stock": _stock_as_json(answer),
        "training": _training_as_json(answer),
        "bound_s": outcome.bound_s,
        "recomputing_bound_s": outcome.recomputing_bound_s,
        "link_bound_s": outcome.link_bound.bound_s,
        "busiest_link": outcome.link_bound.link,
        "efficiency": outcome.efficiency,
        "peak_memory_fraction": outcome.peak_memory_fraction,
        "memory_margin": outcome.margin,
        "dtype": costs.dtype,
        "plan_time_s": outcome.plan_time_s,
        "can_be_trained": answer.cannot_train is None,
        "considered": plain(outcome.considered),
        "rejected": plain(outcome.rejected),
        "reasons": list(answer.sentences),
        "notes": answer.notes,
        "plan": plain(outcome.plan),
        "written": _text(answer.written.plan),
        "used_cluster": _text(answer.written.used_cluster),
        "written_stock": _text(answer.written.stock),
        "stock_cluster": _text(answer.written.stock_cluster),
        "next_command": None if answer.next_command is None else answer.next_command.text,
        **({} if answer.left is None else _left_as_json(answer.left)),
        "used_ranks": list(found.ranks),
        "left_out_ranks": list(found.left_out),
        **({"selections": list(_selections_as_json(found))} if found.points else {}),
        **({} if answer.run is None else {"run": answer.move}),
    }


def _selections_as_json(found: Found) -> Iterator[dict[str, Any]]:
    for point in found.points:
        if point.fits:
            times = {"iteration_s": point.iteration_s, "tokens_per_s": point.tokens_per_s}
            yield {"ranks": list(point.ranks), **times}


def _left_as_json(left: NodesLeft) -> dict[str, Any]:
    return {"without": list(left.lost), "cut_off": list(left.cut_off), "nodes": list(left.names)}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _stock_as_json(answer: Answer) -> dict[str, Any] | None:
    if answer.stock is None:
        return None
    return {
        "even": _layout_as_json(answer, answer.stock.even),
        "best": _layout_as_json(answer, answer.stock.best),
        "recommended": answer.recommends_stock,
    }


def _layout_as_json(answer: Answer, stock: "Stock") -> dict[str, Any]:
    from zorse_megatron.planner.baselines.stock_plans import hosts_of, layout_flags

    layout = stock.fitting
    if layout is None:
        return {"fits": False, "reason": stock.reason}
    return {
        "fits": True,
        "iteration_s": layout.iteration_s,
        "tokens_per_s": layout.tokens_per_s,
        "layout": layout.description,
        "ranks": list(layout.ranks),
        "flags": list(layout_flags(layout.grid)),
        "hosts": plain(hosts_of(answer.found.whole.inputs, layout.ranks)),
    }


def _training_as_json(answer: Answer) -> dict[str, Any] | None:
    if answer.tokens is None:
        return None
    between = [answer.days(each) for each in answer.error_bar.between(1.0)]
    return {"tokens": answer.tokens.count, "days": answer.days(), "days_between": between}
