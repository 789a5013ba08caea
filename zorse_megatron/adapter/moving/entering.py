"""The hooks of a run that may go on under another plan, or that has come from one."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.moving.leaving import leaving_when_asked
from zorse_megatron.adapter.moving.state import take_over
from zorse_megatron.adapter.patches import moving
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.adapter.plan_run import PlanRun

if TYPE_CHECKING:
    from zorse_megatron.adapter.session import PlanSession


def moving_hooks(run: PlanRun, session: "PlanSession") -> Replacements:
    """What is rebound in a run that may be asked to move, or that has moved."""
    hooks: dict[Any, Any] = {}
    if session.may_move:
        hooks[moving.DECIDE_EXIT] = partial(leaving_when_asked, run, session)
    if run.moved is not None:
        hooks[moving.SETUP_FROM_MEMORY] = partial(_setup_from_memory, run, session)
    return hooks


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
