"""What the further reasons of `flags.yaml` depend on: the command, its plan, the plan's GPUs.

A condition, which rows name, is asked for an argument and yields what fills in the braces of its
row, once for each problem. One that takes a plan is asked where there is one. Arguments that
Megatron derives are None at first and skipped; they are asked about again.
"""

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zorse_megatron.errors import PlanError
from zorse_megatron.flags.model_in_flags import (
    RECOMPUTED_MODULES,
    compute_dtypes,
    has_block_loss,
    is_mixed,
    job_dtype,
    layers_with_experts,
    needs_loads_in_order,
    recompute_argument,
)
from zorse_megatron.flags.table import defaults, further_rows, spelling_of
from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.lora import MLP_TARGETS, parse_lora
from zorse_megatron.live.batch_schedule import BatchSchedule
from zorse_megatron.plan.divided_replicas import (
    DividedSizes,
    divided_problems,
    replicas_that_share_experts,
    tp_groups_of,
)
from zorse_megatron.plan.memory_settings import said_settings
from zorse_megatron.plan.plan import Plan, Replica, has_equal_tp_shards
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting
from zorse_megatron.schedule.validate import executes_in_order

Filled = Iterator[Mapping[str, object]]
MUON = "muon"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command that is checked."""

    args: Namespace
    plan: Plan | None
    """None: one is to be made, unless `lacks_plan`."""
    lacks_plan: bool = False
    """Whether its plan cannot be used, so that only what holds under any plan is asked."""
    kinds: Mapping[str, GpuKind] | None = None
    """Of the cluster's GPUs, where they are known beyond the well-known ones."""
    world_size: int | None = None
    """Ranks that have been started; None: not yet."""
    is_own_entry: bool = False
    """Whether our own GPT entry is what trains."""
    is_whole: bool = False
    """Whether the command is run as it is, and does not only say what is trained."""
    is_final: bool = True
    """Whether no flags are added any more for what a machine lacks."""

    def value(self, name: str) -> Any:
        """An argument as a command spells it: of an enumeration the name; None: not known."""
        value = getattr(self.args, name, None)
        return getattr(value, "name", value)

    def has(self, beside: Mapping[str, str | bool]) -> bool:
        """Whether these arguments have these values; true: whether they are on, or given."""
        return all(
            bool(self.value(name)) if wanted is True else self.value(name) == wanted
            for name, wanted in beside.items()
        )

    def integer(self, name: str) -> int | None:
        """An argument that is a whole number by now."""
        value = self.value(name)
        return value if isinstance(value, int) else None


def is_given(name: str, value: Any) -> bool:
    """Whether an argument is on, and not what it is by default."""
    default = defaults().get(name)
    return value not in (None, default) and bool(default or value)


def layout_of(plan: Plan) -> str | None:
    """The plan's chunks as stages (`--pipeline-model-parallel-layout`); None for a single one."""
    return layout([chunk.num_layers for chunk in plan.chunks])


def layout(num_layers: Sequence[int]) -> str | None:
    """Stages of these numbers of layers, as Megatron writes them; None for a single one."""
    if len(num_layers) == 1:
        return None
    return "E" + "|".join(f"t*{number}" for number in num_layers) + "L"


def barring_tp(args: Namespace) -> list[str]:
    """Flags with which no plan may have TP groups, as they are spelled."""
    case = Case(args=args, plan=None)
    return [
        spelling_of(name)
        for row in further_rows()
        if row.when == plan_has_tp_groups.__name__ and case.has(row.beside)
        for name in row.flags.split()
        if _or_default(getattr(args, name, None), name) not in row.accepted
    ]


def fuses_weight_gradients(args: Namespace) -> bool:
    """Whether local layers add weight gradients up within the backward, which cannot be split."""
    name = "gradient_accumulation_fusion"
    is_local = getattr(args, "transformer_impl", None) == "local"
    return is_local and bool(_or_default(getattr(args, name, None), name))


def _or_default(value: Any, name: str) -> Any:
    return defaults().get(name) if value is None else value


# Of the command alone.


def full_recomputation_lacks_settings(case: Case, name: str) -> Filled:
    """Megatron's transformer config would refuse it with a traceback."""
    method, number = case.value("recompute_method"), case.value("recompute_num_layers")
    if case.value(name) == "full" and (method is None or not number):
        yield {"method": method, "number": number}


def only_full_recomputation_has_settings(case: Case, name: str) -> Filled:
    """As above."""
    method, number = case.value("recompute_method"), case.value("recompute_num_layers")
    if case.value(name) != "full" and (method, number) != (None, None):
        yield {"method": method, "number": number}


def modules_are_of_other_layers(case: Case, name: str) -> Filled:
    """As above."""
    others = set(case.value(name) or ()) - set(RECOMPUTED_MODULES)
    if others:
        yield {"others": ", ".join(sorted(others)), "known": ", ".join(RECOMPUTED_MODULES)}


def batches_cut_blocks(case: Case, name: str) -> Filled:
    """Small batches halve micro-batches, and so blocks that a loss is taken over."""
    own = case.integer("micro_batch_size") or 1
    if own > 1 and case.value(name) and has_block_loss(case.args):
        yield {"own": own}


def options_of_experts_conflict(case: Case, name: str) -> Filled:
    """As Megatron says when its config is made, or with weights on inputs in the first forward."""
    number, value = case.integer("num_experts") or 0, case.value(name)
    divides = isinstance(value, int) and bool(number and value and not number % value)
    is_softmax = case.value("moe_router_score_function") in (None, "softmax")
    kinds, losses = (
        _counted(case.value(f"moe_{each}"))
        for each in ("router_load_balancing_type", "aux_loss_coeff")
    )
    fits, expected = {
        "moe_apply_probs_on_input": (case.value("moe_router_topk") == 1, "--moe-router-topk 1"),
        "moe_router_enable_expert_bias": (
            not is_softmax,
            "--moe-router-score-function sigmoid or sqrtsoftplus",
        ),
        "moe_router_num_groups": (divides, "it to divide them"),
        "moe_router_group_topk": (
            _has_groups(case, number),
            "at most --moe-router-num-groups, of which each has as many experts as a token takes",
        ),
        "moe_router_load_balancing_type": (
            kinds == losses,
            f"as many of them as of --moe-aux-loss-coeff, which is given {losses} times",
        ),
        "expert_model_parallel_size": (divides or value == 1, "it to divide them"),
    }[name]
    if (number or name == "expert_model_parallel_size") and value and not fits:
        yield {"expected": expected, "number": number}


def _counted(values: Any) -> int:
    return len(values) if isinstance(values, list | tuple) else 1


def _has_groups(case: Case, num_experts: int) -> bool:
    """Whether groups of experts have what is taken of them."""
    taken, groups = (
        case.integer(f"moe_router_{name}") or 0 for name in ("group_topk", "num_groups")
    )
    topk = case.integer("moe_router_topk") or 0
    return 0 < taken <= groups and topk // taken <= num_experts // groups


def adapters_are_saved_into_their_base(case: Case, name: str) -> Filled:
    """The base's tracker file would name adapters."""
    save, base = case.value(name), case.value("pretrained_checkpoint")
    has_both = getattr(case.args, "zorse_lora", None) is not None and None not in (save, base)
    if has_both and os.path.realpath(save) == os.path.realpath(base):
        yield {"base": base}


def adapters_lack_matrices(case: Case, name: str) -> Filled:
    """A target that layers without a gate have not."""
    lora = getattr(case.args, "zorse_lora", None)
    is_gated = case.value("swiglu") or case.value("quick_geglu")
    if lora is not None and "gate" in lora.targets and not is_gated:
        yield {}


def experts_lack_adapters(case: Case, name: str) -> Filled:
    """Targets of the MLP, in a model with experts."""
    lora = getattr(case.args, "zorse_lora", None)
    of_mlp = [] if lora is None else [each for each in lora.targets if each in MLP_TARGETS]
    if of_mlp and case.value("num_experts"):
        yield {"targets": ",".join(of_mlp)}


def interval_is_missing(case: Case, name: str) -> Filled:
    """In a command that is to be run."""
    interval = case.value(name)
    if case.is_whole and (interval is None or interval < 1):
        yield {"counted": "no such flag" if interval is None else interval}


def plan_is_to_be_made(case: Case, name: str) -> Filled:
    """Then it decides."""
    if case.plan is None and not case.lacks_plan and is_given(name, case.value(name)):
        yield {}


def own_entry_trains(case: Case, name: str) -> Filled:
    """What our own GPT entry leaves out of upstream's pretrain_gpt.py."""
    if case.is_own_entry and case.value(name):
        yield {}


# Of the command and its plan.


def job_has_other_ranks(case: Case, plan: Plan, name: str) -> Filled:
    """A job of other ranks than the plan's."""
    if case.world_size not in (None, plan.world_size):
        yield {
            "world_size": case.world_size,
            "planned": plan.world_size,
            "groups": len(plan.groups),
        }


def stages_are_not_chunks(case: Case, plan: Plan, name: str) -> Filled:
    """A number of stages that is neither that of the groups nor that of the chunks."""
    groups, chunks = len(plan.groups), len(plan.chunks)
    if case.value(name) not in (None, 1, groups, chunks):
        yield {"groups": groups, "chunks": chunks}


def parameters_are_sharded(case: Case, plan: Plan, name: str) -> Filled:
    """Stock hashes unsharded parameters between iterations, when sharded chunks have none."""
    if case.value(name) is not None and parameters_setting(plan) != RESIDENT:
        yield {}


def plan_recomputes(case: Case, plan: Plan, name: str) -> Filled:
    """Settings of the plan beside those of the job."""
    if name != recompute_argument(case.args):
        return
    settings = ((each.recompute_at, each.settings.recompute) for each in said_settings(plan))
    for where, recompute in dict.fromkeys(settings):
        if recompute is not None:
            yield {"setting": where, "mode": recompute.mode}


def sums_are_as_narrow_as_messages(case: Case, plan: Plan, name: str) -> Filled:
    """16-bit messages need fp32 sums."""
    if job_dtype(case.args) != "fp16" or is_mixed(plan) or case.value(name):
        return
    for number, group in enumerate(plan.groups):
        if group.grad_reduce_dtype is not None:
            yield {"group": number, "dtype": group.grad_reduce_dtype}


def messages_lack_a_loss_scale(case: Case, plan: Plan, name: str) -> Filled:
    """Messages in fp16 need a loss scale, whose overflow skips the step."""
    if "fp16" in compute_dtypes(plan, job_dtype(case.args)):
        return
    for number, group in enumerate(plan.groups):
        if group.grad_reduce_dtype == "fp16":
            yield {"group": number}


def groups_have_several_dtypes(case: Case, plan: Plan, name: str) -> Filled:
    """The plan says in which type groups compute."""
    if is_mixed(plan) and case.value(name):
        yield {}


def gpus_lack_bf16(case: Case, plan: Plan, name: str) -> Filled:
    """GPUs without units for it, where the plan says which GPUs it is for."""
    names = _gpu_kinds(plan)
    known = {**GPU_KINDS, **(case.kinds or {})}
    lacking = {kind for kind in names if kind in known and not known[kind].computes_in("bf16")}
    for number, dtype in enumerate(compute_dtypes(plan, job_dtype(case.args))):
        group = plan.groups[number]
        theirs = {names[rank] for rank in group.ranks if rank < len(names)} & lacking
        if dtype == "bf16" and theirs:
            of = f"groups[{number}].compute_dtype" if group.compute_dtype else spelling_of(name)
            yield {"of": of, "group": number, "gpus": " and ".join(sorted(theirs))}


def gpus_lack_flash_attention(case: Case, plan: Plan, name: str) -> Filled:
    """Transformer Engine would stop there. Without `kinds` nobody said what its builds can do."""
    kinds = case.kinds or {}
    lacking = {k for k in _gpu_kinds(plan) if k in kinds and not kinds[k].runs_flash_attention}
    if lacking:
        yield {"gpus": " and ".join(sorted(lacking))}


def _gpu_kinds(plan: Plan) -> Sequence[str]:
    return () if plan.cluster is None else plan.cluster.gpu_kinds or ()


def layout_is_not_of_the_chunks(case: Case, plan: Plan, name: str) -> Filled:
    """A layout that is not that of the chunks."""
    if case.value(name) not in (None, layout_of(plan)):
        yield {"layout": layout_of(plan)}


def batch_is_another(case: Case, plan: Plan, name: str) -> Filled:
    """A batch that is not the plan's."""
    if case.value(name) not in (None, plan.global_batch_size):
        yield {"planned": plan.global_batch_size}


def batches_do_not_fit(case: Case, plan: Plan, name: str) -> Filled:
    """A schedule of batches that this plan could not follow."""
    text, sequence_length = case.value(name), case.integer("seq_length")
    if text is None or sequence_length is None:
        return
    try:
        schedule = BatchSchedule.parse(text, sequence_length=sequence_length)
    except ValueError:
        yield {
            "found": repr(text),
            "expected": "TOKENS:SAMPLES TOKENS:SAMPLES ..., both ascending, the first from 0 on",
            "way": "Such as '0:256 10B:512'.",
        }
        return
    if schedule.sizes[-1] != plan.global_batch_size:
        yield {
            "found": f"{schedule.sizes[-1]} as its largest batch",
            "expected": f"{plan.global_batch_size}, the plan's global_batch_size",
            "way": "Plan for the largest batch; smaller ones follow from it.",
        }
    least = max(sum(bool(r.num_microbatches) for r in group.replicas) for group in plan.groups)
    if schedule.sizes[0] < least:
        yield {
            "found": f"batches of {schedule.sizes[0]} samples",
            "expected": f"{least} at least, one for each replica of a group that runs any",
            "way": "Begin with a larger batch.",
        }


def adapters_are_others(case: Case, plan: Plan, name: str) -> Filled:
    """Than those that the plan was made for; a plan without any is for all weights, or any."""
    planned, own = plan.model.lora, getattr(case.args, "zorse_lora", None)
    if planned is not None and (own is None or parse_lora(planned, []) != own):
        yield {"own": "no such flag" if own is None else own, "planned": planned}


def backwards_are_split(case: Case, plan: Plan, name: str) -> Filled:
    """Into those of inputs and of weights; a machine may add flags until they are final."""
    numbers = [number for number, group in enumerate(plan.groups) if group.split_backward]
    if numbers and (case.is_final or not name):
        yield {"group": numbers[0]}


def batches_are_counted_otherwise(case: Case, name: str) -> Filled:
    """Beside a schedule of batches, what Megatron does not take, or takes for something else."""
    if case.value(name) is None:
        return
    given = getattr(
        case.args,
        "_is_global_batch_size_explicitly_specified",  # by Megatron, once it has parsed
        case.value("global_batch_size") is not None,
    )
    if given:
        yield {
            "found": "the flag beside --global-batch-size",
            "expected": "one of the two, as Megatron has it",
            "way": "Remove --global-batch-size.",
        }
    if case.is_whole and not case.value("train_samples"):
        yield {
            "found": "the flag without --train-samples",
            "expected": "the length of the training in samples",
            "way": "Give --train-samples, and --lr-decay-samples and --lr-warmup-samples: Megatron "
            "counts a micro-batch for each of --train-iters.",
        }


def batch_is_no_multiple(case: Case, plan: Plan, name: str) -> Filled:
    """Micro-batches that do not make the plan's batch, or one that is scheduled."""
    size = case.value(name)
    for planned in _batches(case, plan):
        if size is not None and (size < 1 or planned % size):
            yield {"planned": planned}
            return


def _batches(case: Case, plan: Plan) -> tuple[int, ...]:
    text, sequence_length = case.value("step_batch_size_schedule"), case.integer("seq_length")
    if text is None or sequence_length is None:
        return (plan.global_batch_size,)
    try:
        return BatchSchedule.parse(text, sequence_length=sequence_length).sizes
    except ValueError:  # which `batches_do_not_fit` tells
        return (plan.global_batch_size,)


def model_is_another(case: Case, plan: Plan, name: str) -> Filled:
    """A size that is not that of the plan's model."""
    field = name.removeprefix("padded_")
    planned, own = getattr(plan.model, field), case.value(name)
    if name == "num_query_groups" and not case.value("group_query_attention"):
        # Stock's default stands for nothing then: each head has a group of its own.
        own = case.value("num_attention_heads")
    if name == "num_experts" and plan.model.ffn_hidden_size is not None:
        planned, own = planned or "no experts", own or "no experts"
    if None not in (planned, own) and planned != own:
        yield {"own": own, "planned": planned, "field": field}


def other_layers_have_experts(case: Case, plan: Plan, name: str) -> Filled:
    """Than those of the plan's model, where it says that it has some."""
    value, num_layers = case.value(name), plan.model.num_layers
    if None in (plan.model.num_experts, value):
        return
    planned = plan.model.layers_with_experts
    if _layers_with_experts(value, num_layers) != planned:
        listed = "all of them" if all(planned) else f"layers {[*planned]}"
        yield {"planned": listed.replace(" ", "") if len(planned) > 8 else listed}


def _layers_with_experts(value: Any, num_layers: int) -> tuple[int, ...] | None:
    """None where the flag's value is none of so many layers."""
    try:
        return layers_with_experts(value, num_layers)
    except ValueError:
        return None


def embeddings_are_tied_otherwise(case: Case, plan: Plan, name: str) -> Filled:
    """Other than those of the plan's model."""
    tied, untied = plan.model.tied_embeddings, case.value(name)
    if None not in (tied, untied) and tied == untied:
        yield {"planned": not tied}


def plan_has_tp_groups(case: Case, plan: Plan, name: str) -> Filled:
    """Tensor-parallel groups, with which other values than the row's are not exact."""
    for where, _ in tp_groups_of(plan):
        yield {"own": _or_default(case.value(name), name), "set": where}
        return


def micro_batches_are_no_blocks(case: Case, plan: Plan, name: str) -> Filled:
    """Of which the loss of a micro-batch could be taken as in the command's."""
    own = case.integer("micro_batch_size") or 1
    if not has_block_loss(case.args):
        return
    for number, group in enumerate(plan.groups):
        sizes = {size for replica in group.replicas for size in _samples_of_routers(replica)}
        if size := next((each for each in sorted(sizes) if each % own), None):
            yield {"size": size, "group": number, "own": own}
            return


def loads_come_too_late(case: Case, plan: Plan, name: str) -> Filled:
    """A backward would need what experts get of earlier samples before it can be known."""
    if not needs_loads_in_order(case.args):
        return
    with contextlib.suppress(PlanError):  # said where the plan is checked
        if not executes_in_order(plan, lower_plan(plan)):
            yield {}


def _samples_of_routers(replica: Replica) -> tuple[int, ...]:
    """Those of micro-batches, or a rank's own samples of them, where it shares experts alone."""
    shared = replica.expert_parallel
    if shared is None:
        return replica.sizes
    return tuple(count // shared.parts for count in shared.samples)


def tokens_overlap(case: Case, plan: Plan, name: str) -> Filled:
    """Micro-batches run as two interleaved halves somewhere, and are never there as a whole."""
    excluded, expected = {
        "moe_router_load_balancing_type": (needs_loads_in_order(case.args), "any other loss"),
        "recompute_granularity": (case.value(name) == "full", "layers that are not recomputed"),
    }.get(name, (case.value(name), "samples that are not packed"))
    for where, _, shared in replicas_that_share_experts(plan) if excluded else ():
        if shared.overlap:
            yield {"set": f"{where}.expert_parallel", "expected": expected}
            return


def state_waits(case: Case, plan: Plan, name: str) -> Filled:
    """In the host, from where shards come back piece by piece, and no matrix whole."""
    for said in said_settings(plan):
        for state in ("optimizer_state", "gradients", "parameters"):
            if getattr(said.settings.offload, state):
                yield {"where": f"{said.offload_at}.{state}"}
                return


def vocabulary_is_uneven(case: Case, plan: Plan, name: str) -> Filled:
    """In some TP group."""
    tp_shards = [replica.uneven_tp_shards for _, replica in tp_groups_of(plan)]
    if any(parts and parts.vocabulary_rows for parts in tp_shards):
        yield {}


def tp_groups_between_lack_masks(case: Case, plan: Plan, name: str) -> Filled:
    """Scripts broadcast masks in TP groups of the first and of the last stage only.

    Source: `megatron.core.utils.get_batch_on_this_tp_rank`; other ranks of a TP group in between
    would attend by a mask that nobody has written.
    """
    makes_masks = getattr(case.args, "create_attention_mask_in_dataloader", True)
    if not (case.value(name) and makes_masks):
        return
    between = tuple(f"groups[{chunk.group}]." for chunk in plan.chunks[1:-1])
    for where, _ in tp_groups_of(plan):
        if where.startswith(between):
            yield {"set": where}
            return


def replicas_differ_in_tp_shards(case: Case, plan: Plan, name: str) -> Filled:
    """Stock compares hashes over the data-parallel group, where replicas that differ in TP shards
    hold other parts.

    Source: `megatron.core.utils.check_param_hashes_across_dp_replicas`.
    """
    unlike = [n for n, group in enumerate(plan.groups) if not has_equal_tp_shards(group)]
    if case.value(name) is not None and unlike:
        yield {"group": unlike[0]}


def _all_have_experts(case: Case, plan: Plan) -> bool:
    """Whether no layer is dense, so that nothing is cut by columns."""
    frequency = case.value("moe_layer_freq") or 1
    found = _layers_with_experts(frequency, plan.model.num_layers) or (0,)
    return bool(case.integer("num_experts")) and all(found)


def tp_groups_cannot_divide(case: Case, plan: Plan, name: str) -> Filled:
    """Sizes of the command; a plan that knows its model has been checked by itself."""
    known, grouped = plan.model, case.value("group_query_attention")
    has_heads = known.num_query_groups or known.num_attention_heads
    sizes = DividedSizes(
        num_query_groups=None
        if has_heads
        else case.integer(name if grouped else "num_attention_heads"),
        ffn_hidden_size=None
        if known.ffn_hidden_size or _all_have_experts(case, plan)
        else case.integer("ffn_hidden_size"),
        vocab_size=None if known.vocab_size else case.integer("padded_vocab_size"),
        num_experts=None if known.ffn_hidden_size else case.integer("num_experts") or 0,
        sequence_length=case.integer("seq_length") if case.value("sequence_parallel") else None,
    )
    for each in divided_problems(plan, sizes):
        yield {
            "of": each.where,
            "counts": each.found,
            "fitting": each.expected,
            "way": each.remedy,
        }
