"""Runs the commands that documents print, as they are printed but for what a caller puts in place.

In this process: a start of Python for every command costs more than most of the commands do.
"""

import functools
import pickle
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.conftest import FewLayouts
from zorse_megatron.cli.main import app
from zorse_megatron.planner import find_plan as search_module
from zorse_megatron.planner import gpu_selection
from zorse_megatron.planner.baselines import stock_best
from zorse_megatron.planner.baselines.stock_search import StockSearch
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.search import tensor_parallel_search
from zorse_megatron.planner.search.effort import Effort


def workload(inputs: Inputs, *more: object) -> tuple[object, ...]:
    """What searches of the same command line have in common, and nothing else has."""
    said = inputs.memory.activation_bytes(1, "none"), inputs.memory.gradient_bytes(1)
    what = pickle.dumps((inputs.spec, inputs.kinds, inputs.global_batch_size))
    return what, said, repr(inputs.space), repr(more)


def once(search: Callable[..., Any], more: Callable[..., object]) -> Callable[..., Any]:
    """A search that knows its answers, by its inputs and what `more` says of its options."""
    found: dict[tuple[object, ...], Any] = {}

    def searched(inputs: Inputs, *args: Any, **options: Any) -> Any:
        key = workload(inputs, more(*args, **options))
        if key not in found:
            found[key] = search(inputs, *args, **options)
        return found[key]

    return searched


def keeping(search: type[StockSearch]) -> Callable[..., StockSearch]:
    """Stock's search, whose own answer is kept."""

    def made(inputs: Inputs, share: float = 1.0) -> StockSearch:
        each = search(inputs, share)
        each.run = functools.cache(each.run)  # type: ignore[method-assign]
        return each

    return made


@contextmanager
def each_search_once() -> Iterator[None]:
    """Several commands search for the same plan or layout: again the first answer will do."""
    find_plan = once(search_module.find_plan, lambda **options: options.get("strategy"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "find_plan", find_plan)
        in_short = once(gpu_selection.search, lambda _progress, effort: effort)
        patch.setattr(gpu_selection, "search", in_short)
        of_stock = keeping(stock_best.StockSearch)
        patch.setattr(stock_best, "StockSearch", once(of_stock, lambda share=1.0: share))
        patch.setattr(stock_best, "stock_in_short", once(stock_best.stock_in_short, lambda: None))
        yield


@contextmanager
def searching_little() -> Iterator[None]:
    """For a plan that is not shown."""
    effort = Effort(listed=20, costed=4, widened=2, finalists=4, computations=4000, climb=4000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Effort, "of", lambda inputs: effort)
        patch.setattr(tensor_parallel_search, "tp_layouts_of", lambda inputs: [])
        patch.setattr(stock_best, "StockSearch", FewLayouts)
        patch.setattr(stock_best, "_IN_SHORT", 1)
        patch.setattr(gpu_selection, "fewer", lambda *_: ())
        yield


def words_of(line: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a line after the shell has put in its variables."""
    return shlex.split(Template(line).substitute(variables))


def run_zorse(words: list[str]) -> str:
    """Run `zorse ...`, `> FILE` included; what it prints. Anything but success is an error."""
    program, *rest = words
    assert program == "zorse"
    *rest, target = rest if rest[-2:-1] == [">"] else (*rest, "")
    arguments = rest[:-1] if target else rest
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
    if target:
        Path(target).write_text(result.stdout, encoding="utf-8")
    return result.stdout
