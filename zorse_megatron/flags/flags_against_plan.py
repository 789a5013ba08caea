"""Compare a command's model and batch with its plan."""

from argparse import Namespace
from collections.abc import Sequence

from zorse_megatron.errors import Problem
from zorse_megatron.flags.refused import DECIDED
from zorse_megatron.flags.table import spelling_of
from zorse_megatron.schema.plan.plan import Plan

# Plan field -> (argument, how a missing argument is to be read once arguments are validated).
_MODEL_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "seq_length": "seq_length",
    "vocab_size": "padded_vocab_size",
}


def model_flag_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """Where the model of the flags is not the model of the plan.

    Arguments that Megatron derives later are None when this first runs and skipped then; it runs
    again once they are known.
    """
    problems = []
    for field, argument in _MODEL_FIELDS.items():
        planned, value = getattr(plan.model, field), getattr(args, argument, None)
        if field == "num_query_groups" and not getattr(args, "group_query_attention", None):
            # Stock's default stands for nothing then: each head has a group of its own.
            value = getattr(args, "num_attention_heads", None)
        if planned is not None and value is not None and planned != value:
            problems.append(_model_problem(spelling_of(argument), value, planned, field))
    untied = getattr(args, "untie_embeddings_and_output_weights", None)
    tied = plan.model.tied_embeddings
    if tied is not None and untied is not None and tied == untied:
        where = "--untie-embeddings-and-output-weights"
        problems.append(_model_problem(where, untied, not tied, "tied_embeddings"))
    return problems


def _model_problem(where: str, value: object, planned: object, field: str) -> Problem:
    return Problem(
        where=where,
        found=f"{value}",
        expected=f"{planned}, as the plan was made for (model.{field})",
        remedy="Use the flags that the plan was made for, or make a new plan for this model.",
    )


def batch_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """Batch sizes that are not those of the plan."""
    problems = []
    for name in ("global_batch_size", "eval_global_batch_size"):
        value = getattr(args, name, None)
        if value not in (None, plan.global_batch_size):
            problems.append(
                Problem(
                    where=spelling_of(name),
                    found=f"{value}",
                    expected=f"{plan.global_batch_size}, the plan's global_batch_size",
                    remedy="The plan splits one global batch; change the flag or make a new plan.",
                )
            )
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        value = getattr(args, name, None)
        if value is not None and (value < 1 or plan.global_batch_size % value):
            problems.append(
                Problem(
                    where=spelling_of(name),
                    found=f"{value}",
                    expected=f"a divisor of the global batch size {plan.global_batch_size}",
                    remedy="Micro-batch sizes come from the plan; this one only enters Megatron's "
                    "own arithmetic. Leave it out.",
                )
            )
    return problems


def stage_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """A number of stages that is not the number of chunks."""
    stages = getattr(args, "pipeline_model_parallel_size", None)
    if stages in (None, 1, len(plan.chunks)):
        return []
    return [
        Problem(
            where="--pipeline-model-parallel-size",
            found=f"{stages}",
            expected=f"no such flag, or {len(plan.chunks)}, the plan's number of chunks",
            remedy=DECIDED,
        )
    ]


def layout_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """A layout that is not that of the chunks."""
    given = getattr(args, "pipeline_model_parallel_layout", None)
    if given in (None, layout_of(plan)):
        return []
    return [
        Problem(
            where="--pipeline-model-parallel-layout",
            found=f"{given!r}",
            expected=f"no such flag, or {layout_of(plan)!r}, the plan's layers",
            remedy=DECIDED,
        )
    ]


def layout_of(plan: Plan) -> str | None:
    """The plan's chunks as stages (`--pipeline-model-parallel-layout`); None for a single one."""
    return layout([stop - first for first, stop in (chunk.layers for chunk in plan.chunks)])


def layout(num_layers: Sequence[int]) -> str | None:
    """Stages of these numbers of layers, as Megatron writes them; None for a single one."""
    if len(num_layers) == 1:
        return None
    return "E" + "|".join(f"t*{number}" for number in num_layers) + "L"


def world_problems(plan: Plan, world_size: int) -> list[Problem]:
    """A job of other ranks than the plan's."""
    if world_size == plan.world_size:
        return []
    return [
        Problem(
            where="the number of ranks (WORLD_SIZE)",
            found=f"{world_size}",
            expected=f"{plan.world_size}, which the plan places in {len(plan.groups)} groups",
            remedy=f"Start {plan.world_size} ranks (torchrun --nproc-per-node, --nnodes), or make "
            "a plan for this cluster.",
        )
    ]
