"""From a command's options to cluster, model and costs."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.console import refuse
from zorse_megatron.cli.options import DEFAULT_MARGIN, checked_share
from zorse_megatron.cli.workload import Workload, at_seq_length, with_lora, workload_of
from zorse_megatron.costs.measured_curves import unlikely_times
from zorse_megatron.errors import CheckpointError, FlagError, ModelError, Problem
from zorse_megatron.flags.command import last_values, read_command
from zorse_megatron.gpus.gpu import DTYPE_OF, DtypeChoice, GpuKind, common_dtype
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.inputs.model_rules import tp_problems
from zorse_megatron.inputs.profile import Profile, joined, load_profile
from zorse_megatron.live.checkpoint_choice import (
    Chooser,
    Load,
    SavedExperts,
    may_lack_weights,
    other_experts,
)
from zorse_megatron.plan.plan import ModelFingerprint, Plan

if TYPE_CHECKING:
    from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace


_ONE_PIECE = (
    "local layers add weight gradients up within the backward; with "
    "--no-gradient-accumulation-fusion plans may compute them apart, which fills idle time"
)


@dataclass(frozen=True, kw_only=True)
class WorkloadCosts:
    """A cluster and a model, and what they cost together."""

    cluster: Cluster
    workload: Workload
    dtype: DtypeChoice
    """auto: every group has a type of its own."""
    inputs: "Inputs"
    notes: tuple[str, ...]
    """For people: what was chosen for them, and what the costs rest on."""
    to_do: tuple[str, ...]
    """Of the notes those that ask for another command or measurement."""
    profile: Profile | None
    inputs_for: "Callable[[ModelShape, int], Inputs]"
    """The same for another model and global batch size."""


def costs_of_workload(
    cluster: Cluster,
    workload: Workload,
    profiles: Sequence[Path | Profile],
    *,
    global_batch_size: int,
    margin: float = DEFAULT_MARGIN,
    space: "SearchSpace | None" = None,
) -> WorkloadCosts:
    """Return what a workload costs on a cluster. Raises a ZorseError with every problem.

    `profiles`: files, or what has been read. `space`: which plans are searched, beside what the
    command asks for. None: any, and a plan is there already: what the command asks for is in it or
    not, but explaining it may search again.
    """
    # Here and not above: other commands start faster without these imports.
    from zorse_megatron.planner.inputs.search_inputs import make_inputs

    margin = checked_share(margin, "--margin")
    loaded = [each if isinstance(each, Profile) else load_profile(each) for each in profiles]
    profile = joined(loaded) if loaded else None
    dtype = workload.dtype or DTYPE_OF[common_dtype(cluster.kinds.values())]

    one_piece: tuple[str, ...] = ()
    if space is not None and space.split_backward and not workload.may_split_backward:
        one_piece = (_ONE_PIECE,)
    space = _space_of(space, workload)

    def inputs_for(model: ModelShape, batch: int) -> "Inputs":
        return make_inputs(
            cluster,
            model,
            profile,
            global_batch_size=batch,
            dtype=dtype,
            memory_margin=margin,
            space=space,
            computing=workload.computing,
        )

    inputs = inputs_for(workload.model, global_batch_size)
    unlikely = () if profile is None else unlikely_times(profile, cluster.kinds)
    to_do = (*inputs.to_do, *(f"unlikely: {each}" for each in unlikely))
    notes = dict.fromkeys((*inputs.notes, *workload.notes, *one_piece, *to_do))
    return WorkloadCosts(
        cluster=cluster,
        workload=workload,
        dtype=dtype,
        inputs=inputs,
        notes=(*_dtype_notes(workload, dtype), *notes),
        to_do=to_do,
        profile=profile,
        inputs_for=inputs_for,
    )


def _space_of(space: "SearchSpace | None", workload: Workload) -> "SearchSpace":
    """Without what the training command bars, with the tensor-parallel groups it asks for."""
    from zorse_megatron.planner.inputs.search_inputs import SearchSpace

    if not workload.may_offload:
        space = replace(space or SearchSpace(), offload=False, offload_activations=False)
    if not workload.may_split_backward or workload.computing.lora is not None:
        space = replace(space or SearchSpace(), split_backward=False)
    if workload.barring_tp:
        barring = workload.barring_tp
        return replace(space or SearchSpace(), max_tensor_parallel=1, barring_tp=barring)
    if space is None:
        return SearchSpace()
    return replace(space, requested_tensor_parallel=workload.requested_tensor_parallel)


def _dtype_notes(workload: Workload, dtype: DtypeChoice) -> Iterator[str]:
    if workload.dtype is None:
        yield f"compute dtype {dtype}, which every kind of GPU supports; change it with --dtype"
    elif dtype == "auto":
        yield "every group computes in its own compute_dtype"


def costs_for_plan(
    plan: Plan,
    cluster_file: Path,
    workload: Workload,
    profiles: Sequence[Path],
    *,
    source: str,
    margin: float = DEFAULT_MARGIN,
) -> WorkloadCosts:
    """Return what an existing plan costs. Raises where it is for another cluster or model."""
    from zorse_megatron.inputs.rank_placement import cluster_problems

    cluster = load_cluster(cluster_file)
    if workload.lacks_seq_length and plan.model.seq_length is not None:
        workload = at_seq_length(workload, plan.model.seq_length)
    problems = [
        *cluster_problems(plan, cluster, source),
        *workload_problems(plan, workload, source),
    ]
    refuse(problems, f"{source} was made for something else")
    return costs_on(plan, cluster, workload, profiles, margin=margin)


def costs_on(
    plan: Plan,
    cluster: Cluster,
    workload: Workload,
    profiles: Sequence[Path | Profile],
    *,
    margin: float = DEFAULT_MARGIN,
) -> WorkloadCosts:
    """Return what a plan costs that is for this cluster and model.

    Where all of its groups say what they compute in, the command's type does not count. Adapters
    are those of the plan where a model without a command does not say.
    """
    if all(group.compute_dtype is not None for group in plan.groups):
        workload = replace(workload, dtype="auto")
    if workload.computing.lora is None:
        workload = with_lora(workload, plan.model.lora, where="plan: model.lora")
    return costs_of_workload(
        cluster, workload, profiles, global_batch_size=plan.global_batch_size, margin=margin
    )


def needed_batch_size(workload: Workload) -> int:
    """Return the global batch size. Raises CommandError without it, or without a length."""
    problems = []
    if workload.global_batch_size is None:
        problems.append(_not_said("--global-batch-size", "the number of samples per iteration"))
    if workload.lacks_seq_length:
        problems.append(_not_said("--seq-length", "tokens per sample: a config.json has none"))
    refuse(problems)
    assert workload.global_batch_size is not None
    return workload.global_batch_size


def _not_said(option: str, expected: str) -> Problem:
    return Problem(
        where=option,
        found="no such option",
        expected=expected,
        remedy="Add it here, or to the training command's flags.",
    )


_VOCABULARY = "--vocab-size"


def workload_problems(plan: Plan, workload: Workload, source: str = "plan") -> Iterator[Problem]:
    """Yield where the plan's model and batch are not those of the workload."""
    yield from fingerprint_problems(
        plan, workload.model.fingerprint(workload.computing.lora), source
    )
    widest = max(each.tp_degree for group in plan.groups for each in group.replicas)
    yield from tp_problems(workload.model, f"{source}: ranks of a replica", widest)
    lora = workload.computing.lora
    if lora is not None and plan.model.lora is None:
        yield Problem(
            where=f"{source}: model.lora",
            found=f"none, while {lora} is to be trained",
            expected="the same in both",
            remedy="Leave the adapters out, or make a plan for them.",
        )
    batch = workload.global_batch_size
    if batch is not None and batch != plan.global_batch_size:
        yield Problem(
            where=f"{source}: global_batch_size",
            found=f"{plan.global_batch_size}, while the training command says {batch}",
            expected="the same in both",
            remedy="The plan splits one global batch; change the flag or make a new plan.",
        )


def fingerprint_problems(plan: Plan, model: ModelFingerprint, source: str) -> Iterator[Problem]:
    """Yield every field of the plan's model that another model has otherwise.

    A plan that says how wide feed-forward blocks are says of experts all that there is; one that
    says how many experts there are says of all layers which have some.
    """
    both = plan.model, model
    has_experts = all(each.num_experts for each in both)
    knows_experts = plan.model.ffn_hidden_size is not None or plan.model.num_experts is not None
    for field in dataclasses.fields(ModelFingerprint):
        planned, other = getattr(plan.model, field.name), getattr(model, field.name)
        if field.name == "num_experts" and knows_experts:
            planned, other = planned or 0, other or 0
        if (
            field.name == "moe_layer_freq"
            and has_experts
            and plan.model.num_layers == model.num_layers
        ):
            planned, other = ([*each.layers_with_experts] for each in both)
        if planned is not None and other is not None and planned != other:
            yield Problem(
                where=f"{source}: model.{field.name}",
                found=f"{planned}, while the model has {other}",
                expected="the same in both",
                remedy="Give the model that the plan was made for, or make a new plan.",
            )


def workload_in_flags(
    flags: Sequence[str], plan: Plan, path: Path, kinds: Mapping[str, GpuKind], **options: Any
) -> tuple[Workload, bool]:
    """Read a training command for a plan (from `path`), and whether it says the vocabulary.

    Where it does not (its tokenizer is not here), that of the plan is taken. `kinds`:
    figures of GPUs that only the cluster file has; `options`: as of `workload_of`. Raises FlagError
    for flags that the plan does not go with, ModelError for an inconsistent model.
    """
    options |= {"model": None, "plan": plan, "kinds": kinds, "is_whole": True}
    workload, has_vocabulary = _with_a_vocabulary(flags, plan, options)
    found = workload_problems(plan, workload, str(path)), checkpoint_problems(flags, workload)
    if problems := [problem for each in found for problem in each]:
        raise FlagError(f"the training command does not fit {path}", problems)
    return workload, has_vocabulary


def checkpoint_problems(flags: Sequence[str], workload: Workload) -> Iterator[Problem]:
    """Yield how a model's experts differ from those of the checkpoint that flags load it from.

    Nothing where this machine does not see it, or it is not whole: the job says so.
    """
    args = read_command(flags).args
    load = Load.of(args) if workload.computing.lora is None else Load.of(args).of_base
    try:
        look = None if may_lack_weights(args.dist_ckpt_strictness) else Chooser(load).choose()
    except (CheckpointError, OSError):
        return
    model, expected = workload.model, None
    if (of := model.experts) is not None:
        kinds = model.moe_layer_freq or (1,) * model.num_layers
        expected = SavedExperts.in_layers(kinds, of.num_experts, of.ffn_hidden_size)
    if look and (problem := other_experts(look.checkpoint.folder, expected)):
        yield problem


def _with_a_vocabulary(
    flags: Sequence[str], plan: Plan, options: dict[str, Any]
) -> tuple[Workload, bool]:
    try:
        return workload_of(flags=flags, **options), True
    except ModelError as error:
        if [problem.where for problem in error.problems] != [_VOCABULARY]:
            raise
        if _VOCABULARY in last_values(flags, [_VOCABULARY]):
            raise
    with_size = [*flags, "--padded-vocab-size", str(plan.model.vocab_size or 1)]
    return workload_of(flags=with_size, **options), False
