"""Megatron's command line under a plan: what must agree, what the plan decides, what is refused.

The user's command stays a stock command. A flag that contradicts the plan is an error, never
overruled in silence; what the plan decides (stages, layers per stage, the per-token loss) is set
on the parsed arguments. All problems are reported at once.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zorse_megatron.adapter.compute_dtype import (
    compute_dtypes,
    dtype_problems,
    is_mixed,
    job_dtype,
)
from zorse_megatron.adapter.stages import layout_of
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.schedules.breadth_first import RESIDENT, parameters_setting
from zorse_megatron.schema.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A flag that cannot be used with a plan, unless it has its neutral value."""

    name: str
    allowed: Callable[[Any], bool]
    expected: str
    why: str


def _off(name: str, why: str) -> Refusal:
    return Refusal(name=name, allowed=lambda value: not value, expected="it off", why=why)


def _one(name: str, why: str) -> Refusal:
    return Refusal(name=name, allowed=lambda value: value in (None, 1), expected="1", why=why)


_DECIDED = "The plan decides this; remove the flag."
_NOT_YET = "This does not work under a plan yet; remove the flag, or train without --zorse-plan."

REFUSALS = (
    _one("tensor_model_parallel_size", _NOT_YET),
    _one("context_parallel_size", _NOT_YET),
    _one("expert_model_parallel_size", _NOT_YET),
    _one("expert_tensor_parallel_size", _NOT_YET),
    _one("tensor_parallel_num_weight_shards", _NOT_YET),
    _one("num_distributed_optimizer_instances", _NOT_YET),
    _off("num_experts", _NOT_YET),
    _off("mtp_num_layers", _NOT_YET),
    _off("num_layers_per_virtual_pipeline_stage", _DECIDED),
    _off("num_virtual_stages_per_pipeline_rank", _DECIDED),
    _off("decoder_first_pipeline_num_layers", _DECIDED),
    _off("decoder_last_pipeline_num_layers", _DECIDED),
    _off("account_for_embedding_in_pipeline_split", _DECIDED),
    _off("account_for_loss_in_pipeline_split", _DECIDED),
    _off("rampup_batch_size", _NOT_YET),
    _off("step_batch_size_schedule", _NOT_YET),
    _off("decrease_batch_size_if_needed", _NOT_YET),
    _off("iterations_to_skip", _NOT_YET),
    _off("use_torch_fsdp2", _NOT_YET),
    _off("use_megatron_fsdp", _NOT_YET),
    _off("hybrid_context_parallel", _NOT_YET),
    _off("perform_rl_step", _NOT_YET),
    _off("fp8", _NOT_YET),
    _off("fp4", _NOT_YET),
    _off("optimizer_cpu_offload", _NOT_YET),
    _off("use_precision_aware_optimizer", _NOT_YET),
    _off("data_parallel_random_init", _NOT_YET),
    _off("save_wgrads_interval", _NOT_YET),
    _off("log_params_norm", _NOT_YET),
    _off("ddp_average_in_collective", _NOT_YET),
    _off("ddp_reduce_scatter_with_fp32_accumulation", _NOT_YET),
    _off("nccl_ub", _NOT_YET),
    _off("fp8_param_gather", _NOT_YET),
    _off("fp4_param_gather", _NOT_YET),
    _off("overlap_param_gather_with_optimizer_step", _NOT_YET),
    _off("reuse_grad_buf_for_mxfp8_param_ag", _NOT_YET),
    _off("defer_embedding_wgrad_compute", _NOT_YET),
    _off("qk_clip", _NOT_YET),
    _off("log_max_attention_logit", _NOT_YET),
    _off("yaml_cfg", _NOT_YET),
    _off("use_mp_args_from_checkpoint_args", _NOT_YET),
    _off("fine_grained_activation_offloading", _NOT_YET),
    _off("cpu_offloading_num_layers", _NOT_YET),
    _off("hybrid_layer_pattern", _NOT_YET),
    _off("heterogeneous_layers_config_path", _NOT_YET),
    _off("inprocess_restart", _NOT_YET),
    _off("create_all_gather_group", _NOT_YET),
    _off("high_priority_stream_groups", _NOT_YET),
    _off("nccl_communicator_config_path", _NOT_YET),
    _off("use_sharp", _NOT_YET),
    _off("save_dgrads_interval", _NOT_YET),
    _off("init_model_with_meta_device", _NOT_YET),
    _off("full_validation", _NOT_YET),
    _off("multiple_validation_sets", _NOT_YET),
    _off("skip_train", _NOT_YET),
    Refusal(
        name="cuda_graph_impl",
        allowed=lambda value: value in (None, "none"),
        expected="none",
        why=_NOT_YET,
    ),
    Refusal(
        name="dataloader_type",
        allowed=lambda value: value in (None, "single", "cyclic"),
        expected="single or cyclic",
        why="A plan needs Megatron's global sample order; use Megatron's own data loader.",
    ),
    Refusal(
        name="optimizer",
        allowed=lambda value: value in (None, "adam"),
        expected="adam",
        why=_NOT_YET,
    ),
    Refusal(
        name="ckpt_format",
        allowed=lambda value: value in (None, "torch_dist"),
        expected="torch_dist",
        why="Only torch_dist checkpoints can be read under another plan.",
    ),
)


def flag_of(name: str) -> str:
    """The command-line spelling of an argument."""
    return "--" + name.replace("_", "-")


def problems_of(args: Namespace, plan: Plan, *, world_size: int) -> list[Problem]:
    """Everything in the parsed arguments that does not fit the plan."""
    problems = _world_problems(plan, world_size)
    for refusal in REFUSALS:
        value = getattr(args, refusal.name, None)
        if not refusal.allowed(value):
            problems.append(
                Problem(
                    where=flag_of(refusal.name),
                    found=f"{value!r}",
                    expected=f"{refusal.expected} under --zorse-plan",
                    remedy=refusal.why,
                )
            )
    problems += _stage_problems(args, plan)
    problems += _checkpoint_problems(args)
    problems += _hash_problems(args, plan)
    problems += _recompute_problems(args, plan)
    problems += _wire_problems(args, plan)
    problems += dtype_problems(args, plan)
    problems += _layout_problems(args, plan)
    problems += _batch_problems(args, plan)
    problems += model_problems(args, plan)
    return problems


def _world_problems(plan: Plan, world_size: int) -> list[Problem]:
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


def _stage_problems(args: Namespace, plan: Plan) -> list[Problem]:
    stages = getattr(args, "pipeline_model_parallel_size", None)
    if stages in (None, 1, len(plan.chunks)):
        return []
    return [
        Problem(
            where="--pipeline-model-parallel-size",
            found=f"{stages}",
            expected=f"no such flag, or {len(plan.chunks)}, the plan's number of chunks",
            remedy=_DECIDED,
        )
    ]


def _hash_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """Stock hashes whole parameters between iterations, when sharded chunks have none."""
    interval = args.check_weight_hash_across_dp_replicas_interval
    if interval is None or parameters_setting(plan) == RESIDENT:
        return []
    return [
        Problem(
            where="--check-weight-hash-across-dp-replicas-interval",
            found=f"{interval}, while ranks keep shards of the parameters between iterations",
            expected="no such flag, or a plan that keeps parameters resident",
            remedy="Remove the flag: each element has one owner, and the others' copies are "
            "gathered from it in every iteration.",
        )
    ]


def _recompute_problems(args: Namespace, plan: Plan) -> list[Problem]:
    return [
        Problem(
            where="--recompute-granularity",
            found=f"{args.recompute_granularity!r}, while groups[{number}].recompute says "
            f"{group.recompute.mode!r}",
            expected="one of the two to decide",
            remedy="Remove the flag, or the group's recompute setting.",
        )
        for number, group in enumerate(plan.groups)
        if args.recompute_granularity and group.recompute is not None
    ]


def _wire_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """16-bit messages need fp32 sums, and in fp16 a loss scale whose overflow skips the step."""
    problems, job = [], job_dtype(args)
    for number, group in enumerate(plan.groups):
        if group.gradient_wire is None:
            continue
        where = f"groups[{number}].gradient_wire"
        kept_in_fp16 = job == "fp16" and not is_mixed(plan)
        if kept_in_fp16 and not args.accumulate_allreduce_grads_in_fp32:
            problems.append(
                Problem(
                    where=where,
                    found=f'"{group.gradient_wire}", while gradients are kept in fp16',
                    expected="gradients that are kept in fp32",
                    remedy="Add --accumulate-allreduce-grads-in-fp32, or remove gradient_wire.",
                )
            )
        if group.gradient_wire == "fp16" and "fp16" not in compute_dtypes(plan, job):
            problems.append(
                Problem(
                    where=where,
                    found='"fp16", while nothing computes in fp16',
                    expected="a job with a loss scale, which skips a step whose gradients overflow",
                    remedy='Use "bf16", whose range is that of fp32, or remove gradient_wire.',
                )
            )
    return problems


def _checkpoint_problems(args: Namespace) -> list[Problem]:
    """What would only be refused at the first save, when there is something to lose."""
    stores = args.save is not None or args.load is not None
    if not (stores and args.use_distributed_optimizer):
        return []
    if args.dist_ckpt_optim_fully_reshardable:
        return []
    return [
        Problem(
            where="--use-distributed-optimizer",
            found="no --dist-ckpt-optim-fully-reshardable with it",
            expected="both, where checkpoints are saved or loaded",
            remedy="Add --dist-ckpt-optim-fully-reshardable: stock's other format can only be read "
            "by equal groups of the same number of stages.",
        )
    ]


def _layout_problems(args: Namespace, plan: Plan) -> list[Problem]:
    layout = args.pipeline_model_parallel_layout
    if layout in (None, layout_of(plan)):
        return []
    return [
        Problem(
            where="--pipeline-model-parallel-layout",
            found=f"{layout!r}",
            expected=f"no such flag, or {layout_of(plan)!r}, the plan's layers",
            remedy=_DECIDED,
        )
    ]


def _batch_problems(args: Namespace, plan: Plan) -> list[Problem]:
    problems = []
    for name in ("global_batch_size", "eval_global_batch_size"):
        value = getattr(args, name, None)
        if value not in (None, plan.global_batch_size):
            problems.append(
                Problem(
                    where=flag_of(name),
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
                    where=flag_of(name),
                    found=f"{value}",
                    expected=f"a divisor of the global batch size {plan.global_batch_size}",
                    remedy="Micro-batch sizes come from the plan; this one only enters Megatron's "
                    "own arithmetic. Leave it out.",
                )
            )
    return problems


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


def model_problems(args: Namespace, plan: Plan) -> list[Problem]:
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
            problems.append(_model_problem(flag_of(argument), value, planned, field))
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


def fit_to_plan(args: Namespace, plan: Plan, *, world_size: int) -> list[str]:
    """Check parsed arguments and set what the plan decides. Returns notes for the user.

    Raises FlagError with every problem.
    """
    problems = problems_of(args, plan, world_size=world_size)
    if problems:
        raise FlagError("The command does not fit the plan", problems)
    notes = []
    args.global_batch_size = plan.global_batch_size
    args.micro_batch_size = args.micro_batch_size or 1
    args.pipeline_model_parallel_size = len(plan.chunks)
    args.pipeline_model_parallel_layout = layout_of(plan)
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        notes.append(
            "gradients are those of the mean loss over all tokens of the global batch "
            "(--calculate-per-token-loss); unequal micro-batches have no other exact meaning"
        )
    if getattr(args, "overlap_param_gather", False):
        args.overlap_param_gather = False
        notes.append("parameters are gathered where the action list says (no overlap yet)")
    dtypes = compute_dtypes(plan, job_dtype(args))
    if is_mixed(plan):
        listed = ", ".join(f"group {number} {dtype}" for number, dtype in enumerate(dtypes))
        scale = "one loss scale for all" if "fp16" in dtypes else "no loss scale"
        notes.append(f"types to compute in: {listed}; main parameters in fp32, {scale}")
    return notes
