"""Losses reach the job's last rank as they are, whatever they are and whenever they change."""

import torch
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.adapter.loss import tell_last_rank

STEPS = [
    {"lm loss": torch.tensor(0.1), "mtp loss": torch.tensor(-3e-39)},
    {"lm loss": torch.tensor(1 / 3), "mtp loss": torch.tensor(float("nan"))},
    {},  # as where the job is to end
    {"lm loss": torch.tensor(2 / 3)},
    {"lm loss": torch.tensor([16777217.0])},
    {"lm loss": torch.tensor([2.0**-149])},
    {"lm loss": torch.tensor([1.0, 2.0])},
    {"lm loss": torch.tensor([3.0, 4.0])},
    None,  # as from an evaluation that ran out of time
    {"lm loss": torch.tensor(1 / 7, dtype=torch.float64)},
]
SOURCE, TARGET = 1, 2


def tell_all():
    cpu_mode.enable()
    rank = dist.get_rank()
    steps = iter(STEPS if rank == SOURCE else [{} for _ in STEPS])
    step = tell_last_rank(lambda: (next(steps), rank), source=SOURCE, target=TARGET, rank=rank)
    return [step() for _ in STEPS]


def test_the_last_rank_gets_what_the_source_has():
    first, _, last = run_ranks(3, tell_all)
    assert first == [({}, 0) for _ in STEPS]
    for (found, own), expected in zip(last, STEPS, strict=True):
        assert own == TARGET
        assert (found is None) == (expected is None)
        assert list(found or {}) == list(expected or {})
        for name, value in (found or {}).items():
            torch.testing.assert_close(
                value, expected[name], rtol=0, atol=0, equal_nan=True, check_device=False
            )
