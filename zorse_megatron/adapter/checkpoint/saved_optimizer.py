"""The optimizer's part of a checkpoint: what stock would have written without a plan.

The state tensors are saved by their owners, without a gather (see `saved_parameters`), under
stock's keys; the rest (parameter groups, step, loss scaler) has stock's structure, so a checkpoint
goes from a plan to stock, from stock to a plan and from plan to plan. Sources of the two layouts:
`FP32Optimizer` and `Float16OptimizerWithFloat16Params` in `megatron.core.optimizer.optimizer`;
`DistributedOptimizer.sharded_param_state_fully_reshardable`.
"""

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from enum import Enum
from typing import Any, Self

import torch
from megatron.core.dist_checkpointing.exchange_utils import exchange_loaded_objects_gather_object
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import get_pg_size

from zorse_megatron.adapter.checkpoint.saved_parameters import joined, model_shardings, saved_blocks
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.adapter.tied_embeddings import is_second_copy
from zorse_megatron.errors import FlagError

logger = logging.getLogger(__name__)

_SHARDING_TYPE = "distrib_optim_sharding_type"
_FULLY_RESHARDABLE = "fully_reshardable"
_SHARDS = "shards"


class CheckpointLayout(Enum):
    """Which of stock's optimizers a checkpoint looks like."""

    REPLICATED = "replicated"
    """Without --use-distributed-optimizer: states exp_avg, exp_avg_sq and fp32_param."""
    DISTRIBUTED = "distributed"
    """--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable: param instead of
    fp32_param, for fp32 parameters too."""

    @classmethod
    def of(cls, *, distributed: bool) -> Self:
        """That of stock's distributed optimizer, or of its others."""
        return cls.DISTRIBUTED if distributed else cls.REPLICATED


def sharded_state_dict(
    optimizer: Any, model_sharded_state_dict: Any, *, is_loading: bool, metadata: dict
) -> dict:
    """Build the state dict to save, or the request to load.

    `metadata` is that of the checkpoint (its `content_metadata`), which tells the layout to read.
    Allocates the optimizer's state if there is none yet. Raises FlagError for a layout to read that
    unequal shards cannot have; to write it has been refused as a flag.
    """
    layout = _layout_to_read(metadata) if is_loading else optimizer.checkpoint_layout
    allocate_state(optimizer)
    state = {} if is_loading else _saved_common(optimizer, layout)
    shardings = model_shardings(model_sharded_state_dict)
    shards = {
        str(index): _parameter_state(optimizer, parameter, shardings, layout, is_loading=is_loading)
        for index, parameter in enumerate(owned_parameters(optimizer))
        if is_loading or not is_second_copy(parameter)
    }
    if shards:  # an empty entry would end up in the checkpoint's common part
        state[_SHARDS] = shards
    return state


def load_state_dict(optimizer: Any, state_dict: dict) -> None:
    """Take over a loaded state dict of either layout, of one optimizer or of one beside that of
    experts.

    Raises FlagError for the state of other optimizers, such as stock has with Muon.
    """
    parts = [state_dict[key] for key in sorted(key for key in state_dict if isinstance(key, int))]
    first, *others = parts or [state_dict]
    groups = [group for part in others for group in _inner(part)["param_groups"]]
    if not all(group["is_expert_parallel"] for group in groups):
        raise FlagError.of(
            "The checkpoint cannot be loaded",
            where="the optimizer state",
            found="that of several optimizers, as stock has with Muon",
            expected="that of one, or of one beside that of experts",
            remedy="Go on with the weights alone: --no-load-optim, or --finetune.",
        )
    layout = CheckpointLayout.of(distributed="param_state_sharding_type" in first)
    allocate_state(optimizer)
    _restore_shards(optimizer, state_dict.get(_SHARDS, {}), layout)
    restore_common_state(optimizer, first)


def _inner(state_dict: dict) -> Any:
    """What torch's optimizer has saved."""
    return state_dict if "param_groups" in state_dict else state_dict["optimizer"]


def restore_common_state(optimizer: Any, state_dict: dict) -> None:
    """Take over what is not sharded: parameter groups, step, loss scaler."""
    inner = _inner(state_dict)
    restore_groups(optimizer, inner["param_groups"])
    restore_step(optimizer, saved_step(inner))
    if "grad_scaler" in state_dict and optimizer.grad_scaler:
        optimizer.grad_scaler.load_state_dict(state_dict["grad_scaler"])
    elif ("grad_scaler" in state_dict) != bool(optimizer.grad_scaler):
        logger.warning(
            "the checkpoint has %s loss scaler and this run has %s: the run starts with its own",
            *(("a", "none") if "grad_scaler" in state_dict else ("no", "one")),
        )


# Layouts.


def _layout_to_read(metadata: dict) -> CheckpointLayout:
    found = metadata.get(_SHARDING_TYPE, _FULLY_RESHARDABLE)
    if found != _FULLY_RESHARDABLE:
        raise FlagError.of(
            "The checkpoint cannot be loaded",
            where="the optimizer state's sharding",
            found=repr(found),
            expected=repr(_FULLY_RESHARDABLE),
            remedy="Save with --ckpt-fully-parallel-save "
            "--dist-ckpt-optim-fully-reshardable: the default sharding of "
            "--use-distributed-optimizer is only readable with the data-parallel layout "
            "that wrote it.",
        )
    return CheckpointLayout.of(distributed=_SHARDING_TYPE in metadata)


def common_state(optimizer: Any, layout: CheckpointLayout) -> dict:
    """What is not sharded, the same on all ranks."""
    per_parameter = counts_steps_per_parameter(optimizer.optimizer)
    step = optimizer.step_count
    groups = [
        deepcopy({key: value for key, value in group.items() if key not in ("params", "step")})
        for group in optimizer.optimizer.param_groups
    ]
    inner: dict[str, Any] = {"param_groups": groups}
    if per_parameter and layout is CheckpointLayout.REPLICATED:
        inner["state"] = {"common_step": torch.tensor(float(step))}
    elif per_parameter or (step and not any("momentum" in group for group in groups)):
        for group in groups:
            group["step"] = float(step) if per_parameter else step
    config = optimizer.config
    if layout is CheckpointLayout.REPLICATED and not (config.fp16 or config.bf16):
        return inner
    common: dict[str, Any] = {"optimizer": inner}
    if optimizer.grad_scaler:
        common["grad_scaler"] = optimizer.grad_scaler.state_dict()
    if layout is CheckpointLayout.DISTRIBUTED:
        common["param_state_sharding_type"] = _FULLY_RESHARDABLE
    return common


def _saved_common(optimizer: Any, layout: CheckpointLayout) -> dict:
    """The same as stock has it, whose experts have an optimizer of their own with expert
    parallelism.

    Tensors have the same names with both, but neither stock reads what is not sharded of the other.
    """
    common = common_state(optimizer, layout)
    if not optimizer.saves_experts_apart:
        return common
    of_experts = deepcopy(common)
    inner = _inner(of_experts)
    # Experts have matrices alone: biases have been refused.
    inner["param_groups"] = [
        {**group, "is_expert_parallel": True}
        for group in inner["param_groups"]
        if group["wd_mult"] and not group["is_decoupled_lr"]
    ]
    return {0: common, 1: of_experts}


# State tensors.


def owned_parameters(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """The model parameters of which this rank owns elements."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                yield from bucket["param_map"]


def _parameter_state(
    optimizer: Any,
    parameter: torch.nn.Parameter,
    shardings: dict[int, Any],
    layout: CheckpointLayout,
    *,
    is_loading: bool,
) -> dict[str, dict[str, Any]]:
    """The blocks of one parameter's states: state name in the checkpoint -> number -> block."""
    if id(parameter) not in shardings:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is not in the model's sharded state "
            "dict; expected the model's own parameters there (keep_vars=True)"
        )
    sharding = shardings[id(parameter)]
    chunk = next(each for each in optimizer.model_chunks if parameter in each.parts)
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    found = {}
    for key, tensor in tensors.items():
        name = _name_in_checkpoint(optimizer, key, parameter, layout, is_loading=is_loading)
        if name is None:
            continue
        flat = optimizer.read(tensor)
        if key == "param" and optimizer.is_mixed and parameter.dtype == torch.float32:
            # Both are read into their memory: the model's part may be rounded, this one is not.
            flat = flat.clone()
        blocks = saved_blocks(f"optimizer.state.{name}.", flat, chunk, parameter, sharding)
        found[name] = {str(number): block for number, block in enumerate(blocks)}
    return found


def _name_in_checkpoint(
    optimizer: Any,
    key: str,
    parameter: torch.nn.Parameter,
    layout: CheckpointLayout,
    *,
    is_loading: bool,
) -> str | None:
    """Stock's name of a state, None for what stock does not save as a tensor."""
    if key == "step":
        return None
    if key != "param" or layout is CheckpointLayout.DISTRIBUTED:
        return key
    if optimizer.is_mixed:
        # All groups have it, so that any may load it; weights are loaded in fp32, too.
        return "fp32_param" if optimizer.finds_main or not is_loading else None
    return "fp32_param" if parameter.dtype in (torch.float16, torch.bfloat16) else None


@torch.no_grad()
def _restore_shards(optimizer: Any, shards: dict, layout: CheckpointLayout) -> None:
    for index, parameter in enumerate(owned_parameters(optimizer)):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for key, tensor in tensors.items():
            name = _name_in_checkpoint(optimizer, key, parameter, layout, is_loading=True)
            if name is not None:
                optimizer.write(tensor, joined(shards[str(index)][name]))


# Parameter groups, step counts and memory of an optimizer's state: what is the same on all ranks.
#
# They go through checkpoints (`saved_optimizer`), and from plan to plan in memory.


def allocate_state(optimizer: Any, device: torch.device | None = None) -> None:
    """Give every owned shard its state, zero at step 0, where it has none yet.

    `device`: on which shards are stepped, if that is another one than they are on now.
    """
    inner = optimizer.optimizer
    if optimizer.muon is not None:
        optimizer.muon.allocate()  # stock gives Adam's state to what has none
    optimizer.init_state_fn(inner, optimizer.config)
    if counts_steps_per_parameter(inner):
        for group in inner.param_groups:
            for shard in group["params"]:
                if "step" not in inner.state[shard]:
                    inner.state[shard]["step"] = _step_tensor(0, device or shard.device, group)


def init_momentum(inner: Any, _config: Any = None) -> None:
    """Give SGD the momentum that its first step would make."""
    for group in inner.param_groups:
        for shard in group["params"] if group["momentum"] else ():
            inner.state[shard].setdefault("momentum_buffer", torch.zeros_like(shard.data))


def restore_groups(optimizer: Any, saved_groups: list[dict]) -> None:
    """Take over the hyper-parameters of each group from the saved group of the same kind."""
    saved_by_kind = {_kind(group): group for group in saved_groups}
    for group in optimizer.optimizer.param_groups:
        saved = saved_by_kind.get(_kind(group))
        if saved is None:
            raise FlagError.of(
                "The checkpoint's optimizer does not fit the command",
                where="parameter groups",
                found=f"groups {sorted(map(str, saved_by_kind))} in the checkpoint",
                expected=f"a group {_kind(group)} of {param_group_identifier_keys}",
                remedy="Use the learning-rate and weight-decay flags with which it was "
                "saved, or --no-load-optim.",
            )
        group.update({k: v for k, v in saved.items() if k not in ("params", "step")})


def _kind(group: dict) -> tuple:
    """What stock tells parameter groups apart by (`_filter_and_reorder_param_groups`)."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


def counts_steps_per_parameter(inner: Any) -> bool:
    """torch's Adam keeps a step per parameter, the fused ones per group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def saved_step(inner: dict) -> int:
    """The number of updates, from wherever stock's optimizers keep it."""
    steps = {int(group["step"]) for group in inner["param_groups"] if group.get("step")}
    if common := inner.get("state", {}).get("common_step"):
        steps.add(int(common))
    if len(steps) > 1:
        raise ValueError(f"found steps {sorted(steps)} in the checkpoint; expected one")
    return steps.pop() if steps else 0


def restore_step(optimizer: Any, step: int) -> None:
    optimizer.step_count = step
    inner = optimizer.optimizer
    for group in inner.param_groups:
        if not counts_steps_per_parameter(inner):
            group["step"] = step
            continue
        for shard in group["params"]:
            # One tensor each: torch counts in place, so a shared one would count too fast.
            inner.state[shard]["step"] = _step_tensor(step, shard.device, group)


def _step_tensor(step: int, device: torch.device, group: dict) -> torch.Tensor:
    """A step as torch's Adam would have made it (`torch.optim.adam.Adam._init_group`)."""
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(step), device=device if on_device else "cpu")


# Hooks into distributed checkpoints: data-parallel groups of which only some have a single rank.
#
# Stock's fully parallel save and load share work within a data-parallel group and skip all of it
# when that group has one rank, including calls that the whole world must make. With stock's grids
# the groups all have one size, so all or none skip; with a plan's groups, some ranks would call
# alone.


def _make_load(stock_load: Callable[..., Any]) -> Callable[..., Any]:
    def load(
        self: Any, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore"
    ) -> Any:
        if get_pg_size(self.parallelization_group) > 1:
            return stock_load(self, sharded_state_dict, checkpoint_dir, async_strategy)
        # Read before the load, which replaces the entries.
        _, _, objects, _ = self._defer_loading_sharded_objects(sharded_state_dict)
        loaded = stock_load(self, sharded_state_dict, checkpoint_dir, async_strategy)
        mine = self.base_strategy.load(objects, checkpoint_dir, async_strategy) if objects else {}
        exchange_loaded_objects_gather_object(mine)
        # Stock sets it for groups of several ranks: all compare their next save with it, or none.
        self.cached_global_metadata = getattr(self.base_strategy, "cached_global_metadata", None)
        return loaded

    return load


def _make_save(stock_apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_saving_parallelization(self: Any, sharded_state_dict: Any) -> None:
        alone = get_pg_size(self.parallelization_group) <= 1
        if alone and self.do_cache_distribution and getattr(self, "validated_alone", False):
            return
        stock_apply(self, sharded_state_dict)
        # Stock remembers its distribution, and with it that it has validated; alone there is none.
        self.validated_alone = alone

    return apply_saving_parallelization


PARALLEL_HOOKS: Replacements = {
    "load_in_parallel": _make_load,
    "save_in_parallel": _make_save,
}
