"""The answer of `zorse plan`: what is known of a plan, what to type next, and all of it as JSON."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.command_group import own_options
from zorse_megatron.cli.gpu_selection import CostsOf, Found
from zorse_megatron.cli.observed_run import ObservedRun
from zorse_megatron.cli.options import WorkloadOptions
from zorse_megatron.cli.plan_options import PlanOutputs, Tokens, Written
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import PlanError
from zorse_megatron.files.strict import plain
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.table import WITHOUT_DROPOUT
from zorse_megatron.flags.torch_builds import build_notes
from zorse_megatron.inputs.cluster_yaml import USED_GPUS, dump_cluster
from zorse_megatron.inputs.lora import LORA_FLAG
from zorse_megatron.inputs.model import flags_of_shape
from zorse_megatron.launch.replan import NodesLeft
from zorse_megatron.launch.training_command import stripped_of_layout
from zorse_megatron.schedule.lower import refuse_unsupported

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import Stock
    from zorse_megatron.planner.baselines.stock_search import StockLayout
    from zorse_megatron.planner.explain import ErrorBar
    from zorse_megatron.planner.explanation import Explanation
    from zorse_megatron.planner.outcome import Outcome, Strategy


_MAX_REASONS = 3
_DAY_S = 86_400.0
# Beyond it, explaining takes as long as searching; `zorse explain` still does it.
MOST_EXPLAINED = 512
_WORTH_A_PLUGIN = 1.03
"""Stock Megatron is recommended where its best layout takes less than so many times as long."""
_OF_THIS_ANSWER = ("--json", "--verbose", "-v")
_DTYPE_FLAGS = {"bfloat16": ("--bf16",), "float16": ("--fp16",)}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be planned, as the options say."""

    cluster: Path
    given: WorkloadOptions
    outputs: PlanOutputs
    strategy: "Strategy"
    tokens: Tokens | None
    """How many to train on, if that is asked."""
    costs: WorkloadCosts
    """On all GPUs."""
    costs_of: CostsOf
    left: NodesLeft | None = None
    """Nodes of the cluster file that are not lost; None: all of them."""
    run: ObservedRun | None = None
    """That the plan is to go on with."""

    def save(self, found: Found) -> Written:
        """Write what was found where the options say."""
        left, text = self.left, None
        if left is not None:
            header = f"{USED_GPUS}\nWithout {', '.join((*left.lost, *left.cut_off))}."
            text = dump_cluster(self.costs.cluster, header)
        return self.outputs.saved(found, cluster=self.cluster, left=text)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and what is known of it."""

    task: Task
    found: Found
    written: Written

    @cached_property
    def explanation(self) -> "Explanation | None":
        """None: there are too many GPUs, or no lists of actions."""
        from zorse_megatron.planner.explain import explain

        plan = self.outcome.plan
        if plan.world_size > MOST_EXPLAINED or (self.is_stock and self.has_expert_parallelism):
            return None
        return explain(self.costs.inputs, plan)

    @cached_property
    def error_bar(self) -> "ErrorBar":
        """How far predicted times may be off."""
        from zorse_megatron.planner.explain import error_bar

        return error_bar(self.costs.inputs, num_groups=len(self.outcome.plan.groups))

    @property
    def outcome(self) -> "Outcome":
        """The plan, as it was found."""
        return self.found.outcome

    @property
    def costs(self) -> WorkloadCosts:
        """On the GPUs that are used."""
        return self.found.costs

    @property
    def best_stock(self) -> "StockLayout | None":
        """Stock's best layout; None where none fits, or none was searched."""
        return None if self.found.stock is None else self.found.stock.best.fitting

    @property
    def has_expert_parallelism(self) -> bool:
        """Whether stock's best layout has it, which no plan has."""
        return self.best_stock is not None and self.best_stock.grid.expert_parallel > 1

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
        """How long training takes if an iteration takes so many times what is predicted."""
        assert self.task.tokens is not None
        return factor * self.task.tokens.count / self.tokens_per_s / _DAY_S

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
        run = self.task.run
        return None if run is None else run.move_to(self.outcome, self.written.plan)

    @property
    def next_command(self) -> "NextCommand | None":
        """Start the plan, write it, or explain one that this version cannot train.

        Where stock Megatron is recommended, start its layout. None: there is nothing to type.
        """
        task, written = self.task, self.written
        if written.error is not None or task.run is not None or task.outputs.is_stream:
            return None
        plan, cluster, by_stock = task.outputs.plan, written.used_cluster, self.is_stock
        if self.recommends_stock and written.stock is not None:
            plan, cluster, by_stock = written.stock, written.stock_cluster, True
        if plan is None:
            return _planning_again(task.given)
        files = (str(plan), "--cluster", str(cluster or task.cluster))
        flags, can_be_trained = task.given.training_flags, by_stock or self.cannot_train is None
        trained = (flags or _flags_of(self.costs)) if can_be_trained else ()
        if not trained:
            return _explaining(task.given, files)
        stock = ("--stock",) if by_stock else ()
        launch = ("zorse", "launch", files[0], *stock, *files[1:], "--torchrun", "--")
        words = (*launch, *(_for_stock(trained) if by_stock else trained))
        return NextCommand(words=words, lacks_data=flags is None)


# The command to type next.


@dataclass(frozen=True, kw_only=True)
class NextCommand:
    """Words of a shell, and what is to be known of them."""

    words: tuple[str, ...]
    lacks_data: bool = False
    """Whether it trains a model of which no training command was given."""

    @property
    def text(self) -> str:
        """On one line."""
        return shlex.join(self.words)

    @property
    def line(self) -> str:
        """For people, who may paste it as it is."""
        return f"next{' (add your data)' * self.lacks_data}: {self.text}"


def _planning_again(given: WorkloadOptions) -> NextCommand:
    """With the plan's file."""
    kept = [word for word in own_options(given.context) if word not in _OF_THIS_ANSWER]
    after = () if given.flags is None else ("--", *given.flags)
    return NextCommand(words=("zorse", "plan", *kept, "--out", "plan.json", *after))


def _explaining(given: WorkloadOptions, files: Sequence[str]) -> NextCommand:
    flags = given.training_flags
    what = ("--model", given.model or "") if flags is None else ("--", *flags)
    profiles = (("--profile", str(path)) for path in given.profiles)
    options = (("--dtype", given.dtype), ("--seq-length", given.seq_length), *profiles)
    kept = [str(word) for option in options if option[1] is not None for word in option]
    return NextCommand(words=("zorse", "explain", *files, *kept, *what))


def _for_stock(given: Sequence[str]) -> tuple[str, ...]:
    """A script of Megatron's, which has no other entry, and no flags that the layout decides."""
    script = () if read_command(given).script else ("pretrain_gpt.py",)
    return (*script, *stripped_of_layout(given))


def _flags_of(costs: WorkloadCosts) -> tuple[str, ...]:
    """Those of the model's shape and batch; empty where the shape does not say all of them."""
    workload, lora = costs.workload, costs.workload.computing.lora
    shape = workload.file_flags
    if shape:
        positions = max(workload.model.max_positions, workload.model.seq_length)
        shape = (*shape, "--seq-length", str(workload.model.seq_length))
        shape = (*shape, "--max-position-embeddings", str(positions))  # the last one counts
    elif shape is None:
        shape = flags_of_shape(workload.model)
    if not shape:
        return ()
    return (
        *shape,
        *("--global-batch-size", str(costs.inputs.global_batch_size)),
        *_DTYPE_FLAGS.get(costs.dtype, ()),
        *(() if lora is None else (LORA_FLAG, str(lora), "--pretrained-checkpoint", "BASE")),
        *WITHOUT_DROPOUT,  # as these models are trained
        *("--eval-interval", "1000"),  # without one Megatron ends
    )


# As JSON.


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """Return the same as JSON values, in full precision."""
    found, outcome, costs, bar = answer.found, answer.outcome, answer.costs, answer.error_bar
    task, written, command = answer.task, answer.written, answer.next_command
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
        "written": _text(written.plan),
        "used_cluster": _text(written.used_cluster),
        "written_stock": _text(written.stock),
        "stock_cluster": _text(written.stock_cluster),
        "next_command": None if command is None else command.text,
        **({} if task.left is None else _left_as_json(task.left)),
        "used_ranks": list(found.ranks),
        "left_out_ranks": list(found.left_out),
        **({"selections": list(_selections_as_json(found))} if found.points else {}),
        **({} if task.run is None else {"run": answer.move}),
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
    if answer.found.stock is None:
        return None
    return {
        "even": _layout_as_json(answer, answer.found.stock.even),
        "best": _layout_as_json(answer, answer.found.stock.best),
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
    if answer.task.tokens is None:
        return None
    between = [answer.days(each) for each in answer.error_bar.between(1.0)]
    return {"tokens": answer.task.tokens.count, "days": answer.days(), "days_between": between}
