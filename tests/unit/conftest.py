"""Settings for the fast tests."""

import os

import pytest
from hypothesis import settings

from tests.examples import examples
from zorse_megatron.planner.search.effort import Effort

# No deadline: a busy machine would fail examples at random.
settings.register_profile("zorse", deadline=None, max_examples=examples(100))
settings.load_profile("zorse")
# Tables are as wide as documented, whatever the terminal of whoever runs the tests says.
os.environ.pop("COLUMNS", None)


@pytest.fixture
def little_effort(monkeypatch: pytest.MonkeyPatch) -> Effort:
    """The search with less of everything, for what does not hang on how good a plan is."""
    effort = Effort(listed=20, costed=4, widened=2, finalists=4, computations=4000)
    monkeypatch.setattr(Effort, "of", lambda inputs: effort)
    return effort
