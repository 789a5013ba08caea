"""Refuse, before the search, what cannot be planned in ten minutes."""

from collections.abc import Iterator

from zorse_megatron.errors import Problem
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.planner_errors import PlannerInputError

MAX_GPUS = 10_000
"""As many took 369 s on two cores with other work beside it (docs/planner.md)."""
MAX_LAYERS = 512
"""Partitioning a device order grows with the square of the layers; 200 on 8 GPUs take 25 s."""


def refuse_too_large(inputs: Inputs) -> None:
    """Raise PlannerInputError with everything that is beyond the limits."""
    problems = list(_problems(inputs))
    if problems:
        raise PlannerInputError("This is too large to be planned", problems)


def _problems(inputs: Inputs) -> Iterator[Problem]:
    if inputs.world_size > MAX_GPUS:
        yield Problem(
            where="the cluster",
            found=f"{inputs.world_size:,} GPUs",
            expected=f"at most {MAX_GPUS:,}, which take about ten minutes to plan for",
            remedy="Plan for a part of the cluster, one region or one kind of node, and train one "
            "job there; or write the plan by hand, and try it with zorse explain.",
        )
    if inputs.num_layers > MAX_LAYERS:
        yield Problem(
            where="the model",
            found=f"{inputs.num_layers:,} layers",
            expected=f"at most {MAX_LAYERS:,}",
            remedy="Check num_layers; for such a model write the plan by hand, and try it with "
            "zorse explain.",
        )
