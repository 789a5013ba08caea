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
    found = getattr(args, "transformer_impl", None)
    if found not in (None, "local"):
        problems.append(
            Problem(
                where=f"--transformer-impl {found}",
                found=f"with {where} in the plan",
                expected="--transformer-impl local, whose weight gradients can wait",
                remedy="Add the flag, or remove split_backward from the plan.",
            )
        )
    if getattr(args, "gradient_accumulation_fusion", False):
        problems.append(
            Problem(
                where="gradient_accumulation_fusion",
                found=f"on, with {where} in the plan",
                expected="--no-gradient-accumulation-fusion",
                remedy="Add the flag, or remove split_backward from the plan.",
            )
        )
    return problems
