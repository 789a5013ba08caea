"""What holds for all tests."""

import sys
from collections.abc import Iterator

import pytest

from tests.shared import share_in


@pytest.fixture(scope="module", autouse=True)
def _without_megatron() -> Iterator[None]:
    """The test process never imports Megatron.

    It would take each run of the tests seconds, and CPU mode, which is for good, must come first.
    """
    yield
    assert "megatron.core" not in sys.modules, "a test of this file has imported Megatron"


@pytest.fixture(scope="session", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    share_in(tmp_path_factory, pytestconfig)
