"""Compare a command with a plan that computes weight gradients apart from backwards."""

from argparse import Namespace

from zorse_megatron.errors import Problem
from zorse_megatron.schema.plan.plan import Plan


def split_backward_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """Layers whose weight gradients cannot wait. Asked once it is known what layers a rank has."""
    numbers = [number for number, group in enumerate(plan.groups) if group.split_backward]
    if not numbers:
        return []
    where = f"groups[{numbers[0]}].split_backward"
    problems = []
    is_local = getattr(args, "transformer_impl", None) == "local"
    if is_local and getattr(args, "gradient_accumulation_fusion", False):
        problems.append(
            Problem(
                where="gradient_accumulation_fusion",
                found=f"on, with --transformer-impl local and {where} in the plan",
                expected="--no-gradient-accumulation-fusion, or layers of Transformer Engine",
                remedy="Add the flag, or remove split_backward from the plan.",
            )
        )
    return problems
