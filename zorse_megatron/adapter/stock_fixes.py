"""Bugs of stock Megatron that stop every user of the pip wheel, with or without a GPU."""

import importlib.util
from collections.abc import Callable

from zorse_megatron.adapter.rebind import Rebinding


def _skip_when_built(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Return a `compile_helpers` that runs make only when the extension is missing."""

    def compile_helpers_if_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_helpers_if_missing


STOCK_FIXES: list[Rebinding] = [
    Rebinding(
        target="megatron.core.datasets.utils:compile_helpers",
        make=_skip_when_built,
        parameters=(),
        why="the wheel ships the built extension helpers_cpp but no Makefile; stock runs make "
        "regardless and exits with status 1",
        versions=">=0.19,<0.20",
        test="tests/megatron/test_stock_on_cpu.py::test_stock_trains",
        delete_when="the wheel ships the Makefile, or compile_helpers looks before it builds",
    ),
]
