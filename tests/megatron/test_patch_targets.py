"""Every record of a rebound name fits the Megatron, the torch and the code that are installed."""

from tests.megatron.preloaded import run_megatron_ranks


def _problems() -> list[str]:
    from zorse_megatron.adapter.patches.rebind import REGISTRY

    return [str(problem) for name in REGISTRY.records for problem in REGISTRY.problems(name)]


def test_every_record_fits_what_is_installed() -> None:
    assert run_megatron_ranks(1, _problems) == [[]]
