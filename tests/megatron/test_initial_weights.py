"""Initial weights that rank 0 sends, where parameters are, and what is kept meanwhile."""

import weakref
from argparse import Namespace
from typing import Any

import torch

from tests.megatron.preloaded import run_megatron_ranks


class OnGpu(torch.Tensor):
    """What was copied to the GPU; so is what is computed from it."""


def _sent_from_host_memory() -> tuple[list[str], list[str], list[float]]:
    """What is sent and what digests are made of, and the values that a norm has afterwards."""
    from zorse_megatron.adapter.model import initial_weights

    sent = []

    class OfGpus:
        @staticmethod
        def broadcast(tensor: torch.Tensor, src: int) -> None:
            sent.append(type(tensor).__name__)
            tensor.fill_(7)

    torch.Tensor.cuda = lambda self: self.clone().as_subclass(OnGpu)  # type: ignore[method-assign, assignment]
    initial_weights.dist = OfGpus  # type: ignore[assignment]
    source, norm = initial_weights.OneSource(sends=True), torch.nn.LayerNorm(2)
    source.take(norm.parameters())
    digests = [type(each).__name__ for each in source.digest]
    return sent, digests, [*norm.weight.tolist(), *norm.bias.tolist()]


def test_what_is_built_in_host_memory_goes_through_the_gpu() -> None:
    """Stock builds position embeddings and torch's norms there, from where NCCL takes nothing."""
    ((sent, digests, values),) = run_megatron_ranks(1, _sent_from_host_memory)
    assert sent == digests == ["OnGpu", "OnGpu"]
    assert values == [7.0] * 4


def _build_twice() -> tuple[list[bool], bool]:
    """Kinds alike, digests not; returns who sent, and whether the first model outlived its use."""
    from zorse_megatron.adapter.model import initial_weights

    answers = [True, False]
    initial_weights._is_everywhere = lambda _mine: answers.pop(0) if answers else True  # type: ignore[assignment]
    built: list[Any] = []
    sent, outlived = [], False

    def build(source: initial_weights.OneSource) -> torch.nn.Module:
        nonlocal outlived
        outlived = any(each() is not None for each in built)
        module = torch.nn.Linear(2, 2)
        source.digest.append(torch.zeros(2, dtype=torch.int64))
        sent.append(source.sends)
        built.append(weakref.ref(module))
        return module

    whole = initial_weights._built_alike(build)
    assert whole is built[-1]()
    return sent, outlived


def test_the_model_is_not_there_twice_where_it_is_built_again() -> None:
    ((sent, outlived),) = run_megatron_ranks(1, _build_twice)
    assert sent == [False, True]
    assert not outlived


def _who_brings_all() -> tuple[list[str], bool]:
    """The strictnesses under which a checkpoint does; and whether no checkpoint does."""
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from zorse_megatron.adapter.checkpoint.before_load import brings_all_weights

    chosen: Any = object()
    values = [each.value for each in StrictHandling]
    names = [name for name in values if brings_all_weights(chosen, _strictness(name))]
    return names, brings_all_weights(None, _strictness(names[0]))


def _strictness(name: str) -> Namespace:
    return Namespace(dist_ckpt_strictness=name)


def test_a_load_that_may_pass_over_parameters_leaves_them_as_they_start() -> None:
    ((names, without),) = run_megatron_ranks(1, _who_brings_all)
    assert names == ["assume_ok_unexpected", "raise_unexpected", "raise_all"]
    assert not without
