"""Megatron's command line under a plan: what must agree, and what the plan decides.

The user's command stays a stock command. A flag that contradicts the plan is an error, never
overruled in silence (`zorse_megatron.flags` says which do); what the plan decides (stages, layers
per stage, the per-token loss) is set on the parsed arguments. All problems are reported at once.
"""

from argparse import Namespace
from collections.abc import Mapping

from zorse_megatron.errors import FlagError
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.flags.computing_flags import compute_dtypes, is_mixed, job_dtype
from zorse_megatron.flags.conditions import layout_of
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.rank_axes import set_of_rank


def fit_to_plan(
    args: Namespace,
    plan: Plan,
    *,
    world_size: int,
    kinds: Mapping[str, GpuKind] | None = None,
) -> list[str]:
    """Check parsed arguments and set what the plan decides. Returns notes for the user.

    Raises FlagError with every problem.
    """
    if problems := check_arguments(args, plan, kinds, world_size=world_size):
        raise FlagError("The command does not fit the plan", problems)
    notes = []
    args.global_batch_size = plan.global_batch_size
    args.micro_batch_size = args.micro_batch_size or 1
    args.pipeline_model_parallel_size = len(plan.chunks)
    args.pipeline_model_parallel_layout = layout_of(plan)
    args.zorse_per_token_loss = args.calculate_per_token_loss  # as the command says
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        notes.append(
            "gradients are those of the mean loss over all tokens of the global batch "
            "(--calculate-per-token-loss); unequal micro-batches have no other exact meaning"
        )
    if getattr(args, "overlap_param_gather", False):
        args.overlap_param_gather = False
        notes.append("parameters are gathered where the action list says (no overlap yet)")
    notes += _set_degree(args, plan)
    dtypes = compute_dtypes(plan, job_dtype(args))
    if args.zorse_per_token_loss and "fp16" in dtypes:
        notes.append(
            "--calculate-per-token-loss with fp16: the loss scale is for gradients of a sum over "
            "tokens, as in stock Megatron with this flag; without it, it is for those of a mean, "
            "which have the better range, and the loss is the same"
        )
    if is_mixed(plan):
        listed = ", ".join(f"group {number} {dtype}" for number, dtype in enumerate(dtypes))
        scale = "one loss scale for all" if "fp16" in dtypes else "no loss scale"
        notes.append(f"types to compute in: {listed}; main parameters in fp32, {scale}")
    return notes


def _set_degree(args: Namespace, plan: Plan) -> list[str]:
    """Let this rank's arguments say the degree of its own tensor-parallel set; returns notes.

    The command's own degree stays in `args.zorse_command_degree`: the vocabulary is padded for it.
    """
    args.zorse_command_degree = wanted = args.tensor_model_parallel_size
    args.tensor_model_parallel_size = len(set_of_rank(plan, args.rank))
    degrees = {len(replica.ranks) for group in plan.groups for replica in group.replicas}
    notes = []
    if degrees != {wanted}:
        found = " or ".join(map(str, sorted(degrees)))
        notes.append(
            f"tensor parallelism is the plan's: {found}"
            + ("" if wanted == 1 else f", not --tensor-model-parallel-size {wanted}")
        )
    if degrees != {1}:
        # Their number depends on the degree. Without dropout nothing draws from them.
        args.no_save_rng = args.no_load_rng = True
    return notes
