"""Leave the training for another plan, if all ranks can; else it goes on as if nothing had been.

All happens between two iterations. Until all ranks have told that they have read the plan, can run
it, and have set their state aside, nothing of the training is touched: that is the commit point.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_args, get_tensorboard_writer
from megatron.training.async_utils import maybe_finalize_async_save

from zorse_megatron.adapter.moving.next_plan import checked_plan
from zorse_megatron.adapter.moving.owned_parts import owned_parts
from zorse_megatron.adapter.moving.plan_left import PlanLeft
from zorse_megatron.adapter.moving.requests import PlanRequests
from zorse_megatron.adapter.moving.state import SetAside, set_aside
from zorse_megatron.adapter.placement import check_placement
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.session import PlanSession
from zorse_megatron.adapter.watching.run_watch import RunWatch
from zorse_megatron.errors import ZorseError
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.host_budget import available_host_bytes, node_name
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import fingerprint, parse_plan
from zorse_megatron.schema.status.status import Move

_OF_LOOP = ("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func")


class _RefusedError(Exception):
    """Some rank cannot: the training goes on as it is."""


def leaving_when_asked(session: PlanSession, stock: Callable[..., bool]) -> Callable[..., bool]:
    """Return what takes the place of `checkpoint_and_decide_exit` (`stock`).

    It raises PlanLeft on all ranks, or on none.
    """

    def checkpoint_and_decide_exit(  # noqa: PLR0917  (stock's signature)
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        iteration: int,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any,
        train_data_iterator: Any,
    ) -> bool:
        ends = stock(
            model,
            optimizer,
            opt_param_scheduler,
            iteration,
            num_floating_point_operations_so_far,
            checkpointing_context,
            train_data_iterator,
        )
        watch = session.parts.watch
        requests = None if watch is None else watch.requests
        if (
            watch is None
            or requests is None
            or not requests.is_open
            or ends
            or iteration >= get_args().train_iters
        ):
            return ends
        leave = _Leaving(
            session=session,
            watch=watch,
            models=model,
            scheduler=opt_param_scheduler,
            iteration=iteration,
            num_flops=num_floating_point_operations_so_far,
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
        self.at, self.run = self.session.parts.at, self.session.parts.run
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
            lambda: checked_plan(self.run, self.at, self.session.optimizers, data)
        )
        try:
            check_placement(replace(self.run, plan=plan))
        except ZorseError as error:  # the same on all ranks
            raise _RefusedError(str(error)) from error
        dp_cp = self.at.collection.dp_cp
        parts = self._agreed(lambda: list(owned_parts(self.models, self.session.optimizers, dp_cp)))
        self._check_host(sum(part.device_bytes for part in parts))
        aside: SetAside = self._agreed(
            lambda: set_aside(
                self.session.optimizers,
                parts,
                self.scheduler,
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
        found = [groups.alone, groups.group, groups.set, groups.everyone]
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
        for each in self.session.optimizers:
            if each.optimizer is not None:
                vars(each.optimizer).clear()
            vars(each).clear()


def _fingerprint(data: bytes) -> str | None:
    """Of the plan that was asked for; None: it is none."""
    try:
        return fingerprint(parse_plan(data))
    except ZorseError:
        return None
