"""Hooks into distributed checkpoints: data-parallel groups of which only some have a single rank.

Stock's fully parallel save and load share work within a data-parallel group and skip all of it when
that group has one rank, including calls that the whole world must make. With stock's grids the
groups all have one size, so all or none skip; with a plan's groups, some ranks would call alone.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.exchange_utils import exchange_loaded_objects_gather_object
from megatron.core.utils import get_pg_size

from zorse_megatron.adapter.patches import checkpoints
from zorse_megatron.adapter.patches.rebind import Replacements


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
    checkpoints.LOAD_IN_PARALLEL: _make_load,
    checkpoints.SAVE_IN_PARALLEL: _make_save,
}
