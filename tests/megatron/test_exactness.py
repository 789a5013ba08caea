"""The first promise: under any plan, loss, gradient norm and weights follow stock Megatron's.

The reference is a stock single-process run of the same command. Tolerances are the project's:
loss 2e-5 absolute, gradient norm 1e-4 relative, each parameter 1e-4 relative (norm-wise), after 20
steps in fp32.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.megatron.comparison import (
    BASE_FLAGS,
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    NUM_LAYERS,
    STEPS,
    Recorded,
    plan_run,
    stock_run,
)
from tests.strategies import plans
from zorse_megatron.adapter.byte_corpus import tokenizer_flags, write_byte_corpus
from zorse_megatron.schema.plan import Plan

MAX_LOSS_DIFFERENCE = 2e-5
MAX_RELATIVE_GRAD_NORM_DIFFERENCE = 1e-4
MAX_RELATIVE_WEIGHT_DIFFERENCE = 1e-4

UNTIED = ("--untie-embeddings-and-output-weights",)
NO_CLIP = ("--clip-grad", "0")
MASKED = ("--eod-mask-loss",)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text whose samples differ in how many tokens count.

    The end-of-document token is masked with --eod-mask-loss: rare in long documents, every second
    or third token in short ones.
    """
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    documents = []
    for number in range(1500):
        long = number % 60 == 0
        text = bytes(33 + (number * 7 + i * i) % 90 for i in range(900 if long else 1 + number % 3))
        documents.append((f"document {number}", text))
    write_byte_corpus(prefix, documents=documents, max_bytes=10**7)
    return prefix


def flags_for(corpus: Path, *more: str, steps: int = STEPS) -> tuple[str, ...]:
    return (
        *BASE_FLAGS,
        *("--train-iters", str(steps), "--data-path", str(corpus), "--split", "90,5,5"),
        *tokenizer_flags(),
        *more,
    )


def assert_equal_runs(run: Recorded, reference: Recorded) -> None:
    assert len(run.losses) == len(reference.losses) > 0
    for step, (mine, stock) in enumerate(zip(run.losses, reference.losses, strict=True), start=1):
        assert abs(mine - stock) <= MAX_LOSS_DIFFERENCE, f"loss of step {step}: {mine} != {stock}"
    for step, (mine, stock) in enumerate(
        zip(run.grad_norms, reference.grad_norms, strict=True), start=1
    ):
        assert abs(mine - stock) <= MAX_RELATIVE_GRAD_NORM_DIFFERENCE * stock, (
            f"gradient norm of step {step}: {mine} != {stock}"
        )
    assert_equal_weights(run.final, reference.final)


def assert_equal_weights(
    copies: dict[str, list[torch.Tensor]], reference: dict[str, list[torch.Tensor]]
) -> None:
    """Every rank's copy of every parameter; a tied head is the embedding."""
    assert set(reference) <= set(copies)
    for name, found in copies.items():
        expected = reference.get(name, reference["embedding.word_embeddings.weight"])[0].double()
        for copy in found:
            difference = (copy.double() - expected).norm() / expected.norm()
            assert difference <= MAX_RELATIVE_WEIGHT_DIFFERENCE, f"{name}: {difference}"
        assert all(torch.equal(copy, found[0]) for copy in found), f"copies of {name} differ"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_follows_stock(layout: str, tied: bool, corpus: Path) -> None:
    flags = flags_for(corpus, *(() if tied else UNTIED), *MASKED, "--clip-grad", "0.5")
    reference = stock_run(flags)
    assert max(reference.grad_norms) > 0.5 > min(reference.grad_norms) or layout
    run = plan_run(LAYOUTS[layout], flags)
    assert_equal_runs(run, reference)
    if tied and len(LAYOUTS[layout].chunks) > 1:
        embedding = run.final["embedding.word_embeddings.weight"]
        head = run.final["output_layer.weight"]
        assert all(torch.equal(copy, embedding[0]) for copy in [*embedding, *head])
