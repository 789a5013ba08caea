"""The vocabulary of a training command's tokenizer, against the libraries that Megatron asks."""

import json
from pathlib import Path
from typing import Any

import pytest

from zorse_megatron.errors import ModelError
from zorse_megatron.flags.model_in_flags import shape_from_flags

SHAPE = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--position-embedding-type", "rope"),
)
TEXT = ["hello world, this is a text about tokenizers and words that repeat repeat repeat"] * 5


def rows(*flags: str) -> int:
    """Rows of the table of a command with these flags, not padded unless they say so."""
    return shape_from_flags([*SHAPE, "--make-vocab-size-divisible-by", "1", *flags]).vocab_size


def hugging_face(folder: Path, *flags: str) -> int:
    return rows(
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder), *flags
    )


def reason(*flags: str) -> str:
    with pytest.raises(ModelError) as caught:
        rows(*flags)
    (problem,) = caught.value.problems
    assert problem.where == "--vocab-size" and "--padded-vocab-size" in problem.remedy
    return problem.found


def write(folder: Path, tokenizer: dict[str, Any], **others: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"tokenizer": tokenizer, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def bpe(*tokens: str, **others: Any) -> dict[str, Any]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, **others}


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "corpus.txt").write_text("\n".join(TEXT))
    library.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def trained(kind: str) -> dict[str, Any]:
    """A tokenizer of one of the three models that language models have."""
    library = pytest.importorskip("tokenizers")
    models, trainers, pre = library.models, library.trainers, library.pre_tokenizers
    quiet = {"show_progress": False, "special_tokens": ["<unk>"]}
    model, before, trainer = {
        "bpe": (models.BPE(), pre.ByteLevel(), trainers.BpeTrainer(vocab_size=200, **quiet)),
        "wordpiece": (
            models.WordPiece(unk_token="<unk>"),
            pre.Whitespace(),
            trainers.WordPieceTrainer(vocab_size=90, **quiet),
        ),
        "unigram": (
            models.Unigram(),
            pre.Metaspace(),
            trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **quiet),
        ),
    }[kind]
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = before
    tokenizer.train_from_iterator(TEXT, trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
DECODER = {"900": {"content": "<x>", "special": True}, "1": {"content": "<unk>"}}
# Files beside tokenizer.json, as published tokenizers have them.
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a class": {"tokenizer_config": PLAIN},
    "added tokens": {
        "tokenizer_config": PLAIN
        | {
            "eos_token": "</s>",
            "pad_token": {"__type": "AddedToken", "content": "<pad>"},
            "unk_token": "<unk>",
        }
        | {"additional_special_tokens": ["<a>", "<b>"], "added_tokens_decoder": DECODER}
    },
    "older files": {
        "tokenizer_config": PLAIN,
        "added_tokens": {"<pad>": 600, "<y>": 601},
        "special_tokens_map": {"pad_token": "<pad>", "eos_token": {"content": "</q>"}},
    },
    **{
        name: {"tokenizer_config": {"tokenizer_class": f"{name}Tokenizer{fast}"}}
        for name in ("GPT2", "Qwen2", "GPTNeoX", "Gemma", "Cohere", "Llama")
        for fast in ("Fast",)
    },
    "a class with other tokens": {
        "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    },
}


@pytest.mark.slow  # transformers takes seconds to import
def test_hugging_faces_tokenizers_have_as_many_tokens_as_there(
    tmp_path: Path, sentencepiece_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    folders = [write(tmp_path / name, trained("bpe"), **others) for name, others in BESIDE.items()]
    folders += [
        write(tmp_path / kind, trained(kind), tokenizer_config={"tokenizer_class": owner})
        for kind, owner in (("wordpiece", "BertTokenizer"), ("unigram", PLAIN["tokenizer_class"]))
    ]
    words = write(tmp_path / "no json", {}, tokenizer_config={"tokenizer_class": "BertTokenizer"})
    (words / "tokenizer.json").unlink()
    (words / "vocab.txt").write_text("\n".join(trained("wordpiece")["model"]["vocab"]) + "\n")
    pieces = write(
        tmp_path / "pieces",
        {},
        tokenizer_config={"tokenizer_class": "LlamaTokenizer"},
        added_tokens={"<pad>": 60},
    )
    (pieces / "tokenizer.json").unlink()
    (pieces / "tokenizer.model").write_bytes(sentencepiece_model.read_bytes())
    sizes = {}
    for folder in [*folders, words, pieces]:
        sizes[folder.name] = len(transformers.AutoTokenizer.from_pretrained(str(folder)))
        assert hugging_face(folder) == sizes[folder.name], folder.name
    assert sizes["added tokens"] == sizes["nothing"] + 5 and sizes["GPT2"] == sizes["nothing"] + 1

    # Where transformers has GPT-2's tokenizer.json, other files of a vocabulary do not count.
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "GPT2" / "tokenizer.json").rename(tmp_path / "gpt2" / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    theirs = transformers.AutoTokenizer.from_pretrained(
        "gpt2", vocab_file="other.json", merges_file="merges.txt"
    )
    ours = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "other.json")
    assert rows(*ours, "--merge-file", "merges.txt") == len(theirs)


def test_pieces_are_those_of_sentencepiece(sentencepiece_model: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    count = library.SentencePieceProcessor(model_file=str(sentencepiece_model)).get_piece_size()
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        flags = ("--tokenizer-type", kind, "--tokenizer-model", str(sentencepiece_model))
        assert rows(*flags) == count
    more = ("--tokenizer-sentencepiece-legacy", "--tokenizer-special-tokens", "<mask>", "<s>")
    assert rows(*flags, *more) == count + 1  # it has a piece <s>


def test_a_command_needs_no_vocabulary_beside_its_tokenizer(tmp_path: Path) -> None:
    """By hand: three tokens of the model, one added one, one special one that it lacks."""
    tokenizer = bpe("a", "b", "<eos>", added_tokens=[{"content": "<eos>"}, {"content": "<x>"}])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    folder = write(tmp_path / "mine", tokenizer, tokenizer_config=config)
    assert hugging_face(folder) == 5
    assert hugging_face(folder, "--tokenizer-special-tokens", "<x>", "<y>") == 6
    assert rows("--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder)) == 5
    # The tokenizer decides in a run, too; --padded-vocab-size comes before it.
    assert hugging_face(folder, "--vocab-size", "1000") == 5
    assert hugging_face(folder, "--padded-vocab-size", "1000") == 1000
    assert hugging_face(folder, "--no-pad-vocab-size", "--vocab-size", "1000") == 1000
    padded = (*SHAPE, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder))
    assert shape_from_flags(padded).vocab_size == 128
    assert shape_from_flags(padded, tensor_parallel=4).vocab_size == 512


def test_a_name_of_the_hub_is_looked_up_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "some/model")
    assert "some/model is neither a folder here nor in Hugging Face's cache" in reason(*flags)
    copy = tmp_path / "hub" / "models--some--model"
    write(copy / "snapshots" / "abc", bpe("a", "b", "c"))
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text("abc")
    assert rows(*flags) == 3


def test_sizes_that_megatron_takes_from_flags(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert rows("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000") == 1000
    assert rows("--tokenizer-type", "TikTokenizer", "--vocab-size", "1000") == 1000
    assert rows("--tokenizer-type", "TikTokenizer") == 131072
    assert rows("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "not-here.json") == 50257


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "is no tokenizer: Expecting property name"),
        ("[]", "is no tokenizer: tokenizer.json is no object"),
        ("{}", "is no tokenizer: 'model'"),
        (None, "has no tokenizer.json, vocab.json, vocab.txt or tokenizer.model"),
    ],
)
def test_what_cannot_be_read_is_said_and_a_flag_helps(
    tmp_path: Path, text: str | None, found: str
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder))
    assert found in reason(*flags)
    assert rows(*flags, "--vocab-size", "1000") == 1000


@pytest.mark.parametrize("data", [b"\x0a\x05ab", b"\x0a", b"\xff" * 20, b"text\n"])
def test_no_sentencepiece_model(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    flags = ("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(path))
    assert "is no tokenizer" in reason(*flags)


def test_tokenizers_without_a_reader() -> None:
    assert "BertWordPieceCase are not read here" in reason("--tokenizer-type", "BertWordPieceCase")
    assert "no --tokenizer-model" in reason("--tokenizer-type", "HuggingFaceTokenizer")
    lost = ("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "/no/such.model")
    assert "/no/such.model: No such file or directory" in reason(*lost)
