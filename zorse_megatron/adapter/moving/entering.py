"""The hooks of a run that may go on under another plan, or that has come from one."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.moving.leaving import leaving_when_asked
from zorse_megatron.adapter.moving.mirror import Mirror
from zorse_megatron.adapter.moving.mirror_start import mirror_hooks
from zorse_megatron.adapter.moving.state import take_over
from zorse_megatron.adapter.patches import moving
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.adapter.plan_run import PlanRun

if TYPE_CHECKING:
    from zorse_megatron.adapter.session import PlanSession


def moving_hooks(
    run: PlanRun, session: "PlanSession", mirror: Mirror | None = None, *, is_first: bool = True
) -> Replacements:
    """What is rebound in a run that may be asked to move, that has moved, or that is mirrored.

    `is_first`: no plan was left for this one in these processes.
    """
    hooks: dict[Any, Any] = {}
    if session.may_move:
        hooks[moving.DECIDE_EXIT] = partial(leaving_when_asked, run, session)
    if run.moved is not None:
        hooks[moving.SETUP_FROM_MEMORY] = partial(_setup_from_memory, run, session)
    if mirror is not None:
        set_up, decide = mirror_hooks(mirror, is_first=is_first)
        hooks[moving.SETUP_FROM_MEMORY] = _then(hooks.get(moving.SETUP_FROM_MEMORY), set_up)
        hooks[moving.DECIDE_EXIT] = _then(decide, hooks.get(moving.DECIDE_EXIT))
    return hooks


def _then(first: Any, second: Any) -> Any:
    """One replacement around another; None: there is none."""
    if first is None or second is None:
        return first or second
    return lambda stock: second(first(stock))


def _setup_from_memory(
    run: PlanRun, session: "PlanSession", stock: Callable[..., Any]
) -> Callable[..., Any]:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        known = get_args()
        with (
            presented(known, "load", None),
            presented(known, "pretrained_checkpoint", None),
            presented(known, "perform_initialization", False),
        ):
            model, optimizer, scheduler = stock(*args, **kwargs)
        assert run.moved is not None
        take_over(session, run.moved, model, scheduler)
        return model, optimizer, scheduler

    return setup_model_and_optimizer
