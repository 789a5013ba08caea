"""Bugs of stock Megatron that stop every user of the pip wheel, with or without a GPU."""

import importlib.util
from collections.abc import Callable

from zorse_megatron.adapter.patches import without_plan
from zorse_megatron.adapter.patches.rebind import Replacements


def _skip_when_built(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Return a `compile_helpers` that runs make only when the extension is missing."""

    def compile_helpers_if_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_helpers_if_missing


def stock_fixes() -> Replacements:
    """For every run, with a plan or without one."""
    return {without_plan.COMPILE_HELPERS: _skip_when_built}
