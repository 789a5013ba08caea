"""Leaves the training for another plan, if all ranks can; else it goes on as before.

All happens between two iterations. Until all ranks have told that they have read the plan, can run
it, and have set their state aside, nothing of the training is touched: that is the commit point.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_args, get_tensorboard_writer
from megatron.training.async_utils import maybe_finalize_async_save

from zorse_megatron.adapter.checkpoint.adapters import base_problems
from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.moving.state import SetAside, owned_parts, set_aside, take_over
from zorse_megatron.adapter.optimizer.muon import MUON
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.adapter.plan_run import PlanLeft, PlanRun
from zorse_megatron.adapter.rank_plan import RankPlan, executable_lists
from zorse_megatron.adapter.session import PlanSession
from zorse_megatron.adapter.start_checks import check_placement
from zorse_megatron.adapter.watching import PlanRequests, RunWatch
from zorse_megatron.errors import PlanError, Problem, ZorseError
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.inputs.status import Move
from zorse_megatron.log import say
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import fingerprint, parse_plan
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.host_budget import available_host_bytes, node_name

_OF_LOOP = ("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func")


class _RefusedError(Exception):
    """Some rank cannot: the training goes on as it is."""


def leaving_when_asked(session: PlanSession, stock: Callable[..., bool]) -> Callable[..., bool]:
    """Return what takes the place of `checkpoint_and_decide_exit` (`stock`).

    It raises PlanLeft on all ranks, or on none.
    """
    signature = inspect.signature(stock)

    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> bool:
        ends = stock(*args, **kwargs)
        watch = session.watch
        requests = None if watch is None else watch.requests
        given = signature.bind(*args, **kwargs).arguments
        is_last = given["iteration"] >= get_args().train_iters
        if ends or is_last or watch is None or requests is None or not requests.is_open:
            return ends
        leave = _Leaving(
            session=session,
            watch=watch,
            models=given["model"],
            scheduler=given["opt_param_scheduler"],
            iteration=given["iteration"],
            num_flops=given["num_floating_point_operations_so_far"],
        )
        leave.if_all_can(requests)
        return False

    return checkpoint_and_decide_exit


@dataclass(kw_only=True)
class _Leaving:
    """One attempt."""

    session: PlanSession
    watch: RunWatch
    models: list[Any]
    scheduler: Any
    iteration: int
    num_flops: float

    def __post_init__(self) -> None:
        self.at, self.run = self.session.at, self.session.run
        self.group = self.watch.exchange.group

    def if_all_can(self, requests: PlanRequests) -> None:
        """Raise PlanLeft, or say why not; a collective call."""
        self.run.enter(f"before another plan, after iteration {self.iteration}")
        data = [requests.data]
        dist.broadcast_object_list(data, src=0, group=self.group)
        requests.answer()
        moves = self.watch.reporter.status.moves
        asked_for = _fingerprint(data[0] or b"")
        try:
            run = self._next_run(data[0] or b"")
        except _RefusedError as refused:
            say(f"another plan was asked for; the training goes on as it is: {refused}")
            moves.append(Move(iteration=self.iteration, plan=asked_for, refused=str(refused)))
            return
        run = replace(run, moves=(*moves, Move(iteration=self.iteration, plan=asked_for)))
        say(
            f"from iteration {self.iteration + 1} on the training runs under plan "
            f"{fingerprint(run.plan)} instead of {fingerprint(self.run.plan)}"
        )
        self._close()
        raise PlanLeft(run, self._groups())

    def _next_run(self, data: bytes) -> PlanRun:
        """What all ranks go on with; raises _RefusedError on all ranks where one cannot."""
        plan: Plan = self._agreed(
            lambda: checked_plan(self.run, self.at, self.session.optimizer, data)
        )
        try:
            check_placement(replace(self.run, plan=plan))
        except ZorseError as error:  # the same on all ranks
            raise _RefusedError(str(error)) from error
        dp_cp = self.at.collection.dp_cp
        parts = self._agreed(lambda: list(owned_parts(self.models, self.session.optimizer, dp_cp)))
        self._check_host(sum(part.device_bytes for part in parts))
        aside: SetAside = self._agreed(
            lambda: set_aside(
                self.session.optimizer,
                parts,
                self.scheduler,
                models=self.models,
                iteration=self.iteration,
                num_flops=self.num_flops,
            )
        )
        return replace(self.run, plan=plan, moved=aside)

    def _agreed(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, once it has returned on all ranks."""
        made, problem = None, None
        try:
            made = make()
        except Exception as error:  # whatever it is, the training under the old plan is whole
            known = isinstance(error, ZorseError)
            problem = str(error) if known else "".join(traceback.format_exception_only(error))
        for rank, found in enumerate(gathered(problem, self.group)):
            if found is not None:
                raise _RefusedError(f"rank {rank}: {found.strip()}")
        return made

    def _check_host(self, num_bytes: int) -> None:
        """Ask whether each node has room for what its ranks set aside."""
        told = gathered((node_name(), num_bytes, available_host_bytes()), self.group)
        for node in sorted({name for name, *_ in told}):
            need = sum(each for name, each, _ in told if name == node)
            free = min(each for name, _, each in told if name == node)
            if need > free:
                raise _RefusedError(
                    f"node {node} has {free / 1e9:.3g} GB of host memory free; its ranks have "
                    f"{need / 1e9:.3g} GB of state to set aside"
                )

    def _groups(self) -> list[dist.ProcessGroup]:
        """Those of the plan that is left, in the order in which all ranks have made theirs."""
        groups = self.at.groups
        found = [groups.alone, groups.group, groups.replica, groups.everyone]
        if groups.regions is not None:
            inside = groups.regions.inside
            found += [] if inside is None else [inside]
            found.append(groups.regions.across)
        found.append(self.group)
        if self.session.executor is not None:
            found += self.session.executor.mailbox.transport.groups
        once = {id(group): group for group in found if group is not dist.group.WORLD}
        return list(once.values())

    def _close(self) -> None:
        """Finish what is under way beside the training."""
        self.watch.exchange.finish()
        maybe_finalize_async_save(blocking=True, terminate=True)
        if (board := get_tensorboard_writer()) is not None:
            board.close()
        self._let_go()

    def _let_go(self) -> None:
        """Cut what would keep chunks and state alive once they are left."""
        # The script's config may be a global of it; stock's loop has put methods into it.
        for config in map(get_model_config, self.models):
            for name in _OF_LOOP:
                setattr(config, name, None)
        # Autograd's nodes hold the hooks that hold the chunks, and fp32 shards, as views of
        # parameters, hold the nodes: garbage collection does not see that.
        for model in self.models:
            model.grad_accs.clear()
        ours = self.session.optimizer
        if ours.optimizer is not None:
            vars(ours.optimizer).clear()
        vars(ours).clear()


def _fingerprint(data: bytes) -> str | None:
    """Of the plan that was asked for; None: it is none."""
    try:
        return fingerprint(parse_plan(data))
    except ZorseError:
        return None


# The hooks of a run that may go on under another plan, or that has come from one.


def moving_hooks(session: PlanSession) -> Replacements:
    """What is rebound in a run that may be asked to move, or that has moved."""
    run, hooks = session.run, {}
    if run.may_move:
        hooks["decide_exit"] = partial(leaving_when_asked, session)
    if run.moved is not None:
        hooks["setup_from_memory"] = partial(_setup_from_memory, session, run.moved)
    return hooks


def _setup_from_memory(
    session: PlanSession, aside: SetAside, stock: Callable[..., Any]
) -> Callable[..., Any]:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        given = {"load": None, "pretrained_checkpoint": None, "perform_initialization": False}
        if session.run.options.lora is not None:  # what is frozen comes as at a job's start
            given = {"load": None}
        with presented(get_args(), **given):
            model, optimizer, scheduler = stock(*args, **kwargs)
        take_over(session.at, aside, model, session.optimizer, scheduler)
        return model, optimizer, scheduler

    return setup_model_and_optimizer


# Can this job go on under that plan? Asked on each rank, before anything is touched.


_SOURCE = "the next plan"
# What stock has started, or is recording, and would lose or start a second time.
_ONCE = ("profile", "log_straggler", "run_workload_inspector_server", "log_energy")


def checked_plan(run: PlanRun, at: RankPlan, optimizer: Any, data: bytes) -> Plan:
    """The plan in `data`, checked as at the start of a job; `at`: that runs. Raises ZorseError."""
    plan = parse_plan(data, source=_SOURCE)
    assert run.check_next is not None
    dtypes = run.check_next(plan)
    args = get_args()
    problems = list(_problems(plan, at, args))
    problems += _frozen_problems(optimizer) if run.options.lora is None else ()
    problems += _other_types(dtypes, at)
    lora = run.options.lora
    problems += base_problems(args) if lora is not None and at.rank == 0 else ()
    # In the arguments is what checkpoints say of adapters.
    with nullcontext() if lora is None else presented(args, zorse_lora=lora):
        problems += check_arguments(args, plan, again=True)
    if problems:
        raise PlanError("The next plan cannot take over", problems)
    executable_lists(plan, tied=at.tied_embeddings)
    return plan


def _problems(plan: Plan, at: RankPlan, args: Any) -> Iterator[Problem]:
    if plan.global_batch_size != at.plan.global_batch_size:
        yield Problem(
            where=f"{_SOURCE}: global_batch_size",
            found=str(plan.global_batch_size),
            expected=f"{at.plan.global_batch_size}, as in the plan that runs",
            remedy="Plan for the same batch: the training is to stay the same.",
        )
    given = [f"--{name.replace('_', '-')}" for name in _ONCE if getattr(args, name, False)]
    if args.optimizer == MUON:  # its matrices have another state than Adam's parameters
        given.append(f"--optimizer {MUON}")
    for flag in given:
        yield Problem(
            where=flag,
            found="it in the command",
            expected="a command without it, for a run that goes on under another plan",
            remedy="Save a checkpoint, and start the next plan from it.",
        )


def _frozen_problems(optimizer: Any) -> Iterator[Problem]:
    """The first parameter of this rank that has no optimizer state, which is what moves."""
    frozen = [
        name
        for chunk in optimizer.model_chunks
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    ]
    if frozen:
        yield Problem(
            where=f"parameter {frozen[0]}",
            found="one that is not trained",
            expected="trained ones only: others have no optimizer state, which is what moves",
            remedy="Save a checkpoint, and start the next plan from it.",
        )


def _other_types(dtypes: Any, at: RankPlan) -> Iterator[Problem]:
    now = [at.dtypes[at.plan.group_of_rank(rank)] for rank in range(at.plan.world_size)]
    if list(dtypes) != now:
        yield Problem(
            where=f"{_SOURCE}: compute_dtype",
            found=", ".join(map(str, dtypes)),
            expected=f"{', '.join(map(str, now))} on the ranks, as they compute now",
            remedy="Let each rank compute in its present type.",
        )
