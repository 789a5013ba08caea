"""The hooks of a run that may go on under another plan, or that has come from one."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.moving.leaving import leaving_when_asked
from zorse_megatron.adapter.moving.state import SetAside, take_over
from zorse_megatron.adapter.patches import moving
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.adapter.session import PlanSession


def moving_hooks(session: PlanSession) -> Replacements:
    """What is rebound in a run that may be asked to move, or that has moved."""
    run, hooks = session.parts.run, {}
    if run.may_move:
        hooks[moving.DECIDE_EXIT] = partial(leaving_when_asked, session)
    if run.moved is not None:
        hooks[moving.SETUP_FROM_MEMORY] = partial(_setup_from_memory, session, run.moved)
    return hooks


def _setup_from_memory(
    session: PlanSession, aside: SetAside, stock: Callable[..., Any]
) -> Callable[..., Any]:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        known = get_args()
        with (
            presented(known, "load", None),
            presented(known, "pretrained_checkpoint", None),
            presented(known, "perform_initialization", False),
        ):
            model, optimizer, scheduler = stock(*args, **kwargs)
        take_over(session.parts.at, aside, model, session.optimizers, scheduler)
        return model, optimizer, scheduler

    return setup_model_and_optimizer
