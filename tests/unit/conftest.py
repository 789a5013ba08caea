"""Settings for the fast tests."""

import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from tests.examples import examples
from tests.unit.cli_samples import runner_in
from tests.unit.strangers import MANY
from zorse_megatron.planner.baselines import stock_best
from zorse_megatron.planner.baselines.stock_search import StockLayout, StockSearch
from zorse_megatron.planner.search.effort import Effort

# No deadline: a busy machine would fail examples at random.
settings.register_profile("zorse", deadline=None, max_examples=examples(100))
settings.load_profile("zorse")
# Tables are as wide as documented, whatever the terminal of whoever runs the tests says.
os.environ.pop("COLUMNS", None)

LITTLE_EFFORT = Effort(
    listed=20,
    costed=4,
    widened=2,
    finalists=4,
    computations=2000,
    orders=1,
    levels=(1, 2, 4),
    partitions=4,
    polished=2,
    followed=2,
    refits=2,
    tries=4,
    climb=1000,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What runs `zorse` beside good files, in `tmp_path`."""
    return runner_in(tmp_path, monkeypatch)


@pytest.fixture
def little_effort(monkeypatch: pytest.MonkeyPatch) -> Effort:
    """The search with less of everything, for what does not hang on how good a plan is."""
    monkeypatch.setattr(Effort, "of", lambda inputs: LITTLE_EFFORT)
    return LITTLE_EFFORT


class FewLayouts(StockSearch):
    """Looks at one even layout alone, and at none on fewer GPUs."""

    searched: ClassVar[list[tuple[str, ...]]] = []
    """Kinds of the GPUs of each search."""

    def run(self) -> list[StockLayout]:
        self.searched.append(self.base.kinds)
        tried = [self._simulated_whole(seed.site) for seed in self._even(self._placements[0])]
        return [each for each in tried if each.fits][:1]

    def quick_s(self) -> float:
        return math.inf


@pytest.fixture
def few_layouts(monkeypatch: pytest.MonkeyPatch) -> type[FewLayouts]:
    """Stock's layouts are hardly searched, for what does not hang on how fast they are."""
    monkeypatch.setattr(stock_best, "StockSearch", FewLayouts)
    monkeypatch.setattr(stock_best, "_IN_SHORT", 1)
    monkeypatch.setattr(FewLayouts, "searched", [])
    return FewLayouts


@pytest.fixture
def many_files() -> Iterator[None]:
    """For both ends of the connections of all strangers."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 4 * MANY)), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
