"""NVIDIA's own `pretrain_gpt.py`, unmodified: what is special about it.

That plans follow stock with it is shown by the other tests, which run it too (see `comparison`).
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.megatron.comparison import (
    GLOBAL_BATCH_SIZE,
    MASKED,
    MAX_LOSS_DIFFERENCE,
    UNTIED,
    assert_follows,
    assert_same_bits,
    evaluations,
    flags_for,
    plan_run,
    stock_run,
)
from tests.megatron.plans import (
    BOTH_ENDS,
    TWO_BY_TWO,
    in_the_host,
    plan_of,
    replica,
    tp_replica,
    with_settings,
)
from tests.megatron.upstream import DIRECTORY, PRETRAIN_GPT, needs_upstream
from tests.unit.test_patches import apply
from zorse_megatron.plan.plan import Schedule, TpShards

pytestmark = needs_upstream

EVALUATED = ("--eval-interval", "2", "--eval-iters", "1")


def test_computes_what_the_built_in_entry_computes(corpus: Path, tmp_path: Path) -> None:
    """Also started by itself, as `torchrun pretrain_gpt.py` is, from a patched copy."""
    flags = flags_for(corpus, *MASKED, *EVALUATED, "--clip-grad", "0.5", steps=2)
    run, built_in = plan_run(TWO_BY_TWO, flags), plan_run(TWO_BY_TWO, flags, script=())
    assert_same_bits(built_in, run)
    assert evaluations(built_in) == evaluations(run)
    for file in DIRECTORY.glob("*.py"):
        shutil.copy(file, tmp_path)
    apply(tmp_path)
    patched = plan_run(
        TWO_BY_TWO,
        flags,
        entry="tests.megatron.patched_entry",
        script=(),
        env={"ZORSE_TEST_SCRIPT": str(tmp_path / PRETRAIN_GPT.name)},
    )
    assert_same_bits(patched, run)
    assert evaluations(patched) == evaluations(run)


# The group in the middle has no data; a replica computes nothing.
IN_THE_MIDDLE = with_settings(in_the_host(BOTH_ENDS), schedule=Schedule(name="interleaved"))


def test_layers_in_the_middle_know_where_documents_end(corpus: Path) -> None:
    # Attention that matters from the start.
    masks = ("--reset-attention-mask", "--reset-position-ids", "--init-method-std", "0.2")
    # Biases of keys have no gradient but rounding, which Adam makes as large as any other.
    masks += ("--disable-bias-linear",)
    flags = flags_for(corpus, *UNTIED, *MASKED, *masks, *EVALUATED, steps=2)
    reference, run = stock_run(flags), plan_run(IN_THE_MIDDLE, flags)
    assert_follows(run, reference)
    expected = evaluations(reference)
    assert evaluations(run) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)
    across = flags_for(corpus, *UNTIED, *MASKED, *masks[1:], steps=2)
    unmasked = stock_run(across).losses
    differences = [abs(a - b) for a, b in zip(unmasked, reference.losses, strict=True)]
    assert max(differences) > 100 * MAX_LOSS_DIFFERENCE, "masks must matter"


PACKED = {"entry": "tests.megatron.packed_entry"}


def test_trains_on_packed_documents(corpus: Path) -> None:
    """Several packed samples in a micro-batch, which is one sequence to the layers."""
    packed = ("--dataloader-inter-document-masking", "--position-embedding-type", "rope")
    flags = flags_for(corpus, *UNTIED, *MASKED, *packed, *EVALUATED, steps=2)
    reference, run = stock_run(flags, **PACKED), plan_run(TWO_BY_TWO, flags, **PACKED)
    assert_follows(run, reference)
    expected = evaluations(reference)
    assert evaluations(run) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)


def write_conversations(path: Path, count: int = 200) -> None:
    """Conversations of different lengths, one to three in a line."""
    lines = []
    for number in range(count):
        messages = []
        for part in range(1 + number % 3):
            words = " ".join(f"w{(number * 7 + i * part) % 40}" for i in range(2 + number % 6))
            messages += [
                {"role": "system", "content": f"w{part}"},
                {"role": "user", "content": words},
                {"role": "assistant", "content": words[::-1].replace("w", " w")},
            ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))


def write_tokenizer(directory: Path, start: str = "") -> None:
    """A word-level tokenizer as Hugging Face stores them; `start`: of each conversation."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", *(f"w{i}" for i in range(40)), *map(str, range(10))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = start + "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=template,
    ).save_pretrained(directory)


def tuned_on(directory: Path, tokenizer: Path, *more: str) -> tuple[str, ...]:
    """The command that fine-tunes on `directory`'s conversations."""
    tuned = (
        *("--sft", "--sft-tokenizer-prompt-format", "default", "--tokenizer-type", "SFTTokenizer"),
        *("--tokenizer-model", str(tokenizer), "--position-embedding-type", "rope"),
        *("--no-create-attention-mask-in-dataloader",),
    )
    return flags_for(directory / "talk.jsonl", *UNTIED, *tuned, *more, steps=2)


def with_value(flags: tuple[str, ...], flag: str, value: int) -> tuple[str, ...]:
    place = flags.index(flag) + 1
    return (*flags[:place], str(value), *flags[place + 1 :])


# Groups of tensor-parallel ranks at both ends and in the middle, two of them with unequal heads.
WITH_TP_GROUPS = plan_of(
    ((tp_replica((0, 1), 2, 4),), 1),
    ((tp_replica((2, 3), 1, 4, 1.0, TpShards(kv_groups=(3, 1))), replica(4, 2, 2, 2.0)), 2),
    ((tp_replica((5, 6), 4, 2, 1.0, TpShards(kv_groups=(4, 0), mlp_columns=(96, 32))),), 1),
)


def test_fine_tunes_on_conversations(tmp_path: Path) -> None:
    """Without Transformer Engine; stock attends by a mask of all that are packed together."""
    write_conversations(tmp_path / "talk.jsonl")
    write_tokenizer(tmp_path / "tokenizer")
    flags = tuned_on(tmp_path, tmp_path / "tokenizer", *EVALUATED)
    # Stock's evaluation averages means of micro-batches; a plan takes the mean of the batch, as
    # stock does with one micro-batch.
    whole = with_value(flags, "--micro-batch-size", GLOBAL_BATCH_SIZE)
    reference = stock_run(whole, **PACKED)
    expected = evaluations(reference)
    for plan, more in (
        (IN_THE_MIDDLE, ()),
        (WITH_TP_GROUPS, ()),
        (WITH_TP_GROUPS, ("--sequence-parallel",)),
    ):
        run = plan_run(plan, (*flags, *more), **PACKED)
        assert_follows(run, reference)
        assert evaluations(run) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)


def test_packed_conversations_count_as_each_alone(tmp_path: Path) -> None:
    """Three in a sample, or one: the same tokens, though prompts mask very unequal parts of them.

    A conversation starts with a token that is masked, as prompts are; without one, stock lets each
    conversation's last token predict the first of the next.
    """
    write_tokenizer(tmp_path / "tokenizer", start="<pad> ")
    words = [" ".join(f"w{(7 * n + i) % 40}" for i in range(1 + n * n % 9)) for n in range(600)]
    talks = [{"role": "system", "content": each} for each in words]
    for name, together in (("packed", 3), ("alone", 1)):
        starts = range(0, len(talks), together)
        lines = [json.dumps({"messages": talks[start : start + together]}) for start in starts]
        (tmp_path / name).mkdir()
        (tmp_path / name / "talk.jsonl").write_text("\n".join(lines))
    alone = with_value(
        tuned_on(tmp_path / "alone", tmp_path / "tokenizer", *EVALUATED), "--global-batch-size", 24
    )
    reference = stock_run(alone, **PACKED)
    packed = tuned_on(tmp_path / "packed", tmp_path / "tokenizer", *EVALUATED)
    assert_follows(plan_run(TWO_BY_TWO, packed, **PACKED), reference)
