"""How many tokens the tokenizer of a command has, from its files, without the libraries.

Megatron-core 0.19 pads `tokenizer.vocab_size` (`core/tokenizers/utils/build_tokenizer.py`): of a
tokenizer of Hugging Face's `len(AutoTokenizer.from_pretrained(...))`, of sentencepiece the number
of pieces, of tiktoken and of the tokenizer without files what --vocab-size says. `len` counts
distinct tokens: those of the model, added ones, and special ones that the model lacks.
"""

import json
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zorse_megatron.files.read_write import read_input

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_TIKTOKEN_DEFAULT = 2**17
_GPT2 = 50257
"""Tokens of `gpt2` at the hub, which transformers loads for GPT2BPETokenizer whatever the files of
--vocab-file and --merge-file are, as it has a tokenizer.json."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Special tokens that the class of a tokenizer has where its files name none (transformers 5).
_CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "GPT2": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "Qwen2": dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>"),
    "GPTNeoX": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>") | {"pad": "<|padding|>"},
    "Gemma": {
        "bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>",
    },
    "Bert": {
        "unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]",
    },
    "Cohere": {
        "bos": "<BOS_TOKEN>", "eos": "<|END_OF_TURN_TOKEN|>", "unk": "<UNK>", "sep": "<SEP>",
        "pad": "<PAD>", "cls": "<CLS>", "mask": "<MASK_TOKEN>",
    },
}  # fmt: skip


class NotReadable(Exception):
    """The number of tokens is not known here; the message says why."""


def tokens_of(args: Namespace) -> int | None:
    """Return how many tokens a command's tokenizer has; None where --vocab-size says it.

    `args`: of Megatron's parser. Raises NotReadable.
    """
    kind, special = args.tokenizer_type, args.special_tokens or []
    if kind in (None, "NullTokenizer") or not args.pad_vocab_size:
        return None
    try:
        if kind == "SFTTokenizer" or (kind == "HuggingFaceTokenizer" and not args.vocab_file):
            added = special if kind == "HuggingFaceTokenizer" else []
            return len({*_hugging_face(_folder(args.tokenizer_model)), *added})
        if kind == "GPT2BPETokenizer":
            return _gpt2(special)
        if kind in _SENTENCEPIECE:
            if args.tokenizer_model is None:
                raise NotReadable("no --tokenizer-model")
            pieces = set(_pieces(Path(args.tokenizer_model)))
            return len(pieces | set(special if args.tokenizer_sentencepiece_legacy else ()))
    except OSError as error:
        raise NotReadable(f"{args.tokenizer_model}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotReadable(f"{args.tokenizer_model} is no tokenizer: {error}") from error
    if kind == "TikTokenizer":
        return args.vocab_size or _TIKTOKEN_DEFAULT
    raise NotReadable(f"the files of {kind} are not read here")


def _gpt2(special: Iterable[str]) -> int:
    try:
        return len({*_hugging_face(_folder("gpt2")), *special})
    except NotReadable:
        return _GPT2 + len(set(special) - {"<|endoftext|>"})


def _folder(name: str | None) -> Path:
    """Return the folder that transformers would read: that one, or its copy of the hub's."""
    if name is None:
        raise NotReadable("no --tokenizer-model")
    if Path(name).is_dir():
        return Path(name)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
        hub = os.environ.get("HF_HUB_CACHE") or f"{home}/hub"
        copy = Path(hub).expanduser() / ("models--" + name.replace("/", "--"))
        try:
            return copy / "snapshots" / (copy / "refs" / "main").read_text().strip()
        except OSError:
            raise NotReadable(
                f"{name} is neither a folder here nor in Hugging Face's cache"
            ) from None
    raise NotReadable(f"there is no folder {name} here")


def _hugging_face(folder: Path) -> Iterator[str]:
    """Yield the tokens of a tokenizer of Hugging Face's, some of them more than once."""
    config = _json(folder / "tokenizer_config.json")
    legacy = _json(folder / "special_tokens_map.json")
    yield from _base_tokens(folder)
    yield from _json(folder / "added_tokens.json")
    yield from map(_content, config.get("added_tokens_decoder", {}).values())
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
    if kind == "T5":  # its sentinels depend on what else is there
        raise NotReadable(f"the tokens that {config['tokenizer_class']} adds are not known here")
    for role in _ROLES:
        key = f"{role}_token"
        token = config.get(key, legacy.get(key, _CLASS_TOKENS.get(kind, {}).get(role)))
        if token is not None:
            yield _content(token)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or legacy.get(key) or ()
        yield from map(_content, more.values() if isinstance(more, dict) else more)


def _base_tokens(folder: Path) -> Iterator[str]:
    """Yield the tokens of the model itself, from the first of the files that there is."""
    if (folder / "tokenizer.json").is_file():
        whole = _json(folder / "tokenizer.json")
        vocabulary = whole["model"]["vocab"]  # a mapping, or pairs of token and score
        yield from vocabulary if isinstance(vocabulary, dict) else (each[0] for each in vocabulary)
        yield from (each["content"] for each in whole.get("added_tokens") or ())
    elif (folder / "vocab.json").is_file():
        yield from _json(folder / "vocab.json")
    elif (folder / "vocab.txt").is_file():
        yield from read_input(folder / "vocab.txt").decode().splitlines()
    elif (folder / "tokenizer.model").is_file():
        yield from _pieces(folder / "tokenizer.model")
    else:
        names = "tokenizer.json, vocab.json, vocab.txt or tokenizer.model"
        raise NotReadable(f"{folder} has no {names}")


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one where there is no file."""
    try:
        value = json.loads(read_input(path))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no object")
    return value


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _pieces(path: Path) -> Iterator[str]:
    """Yield the pieces of a sentencepiece model: field 1 of its protobuf, text in field 1 of each.

    As sentencepiece's own definition has it: ModelProto.pieces, SentencePiece.piece.
    """
    for number, piece in _fields(read_input(path)):
        if number == 1 and isinstance(piece, bytes):
            yield from (text.decode() for inner, text in _fields(piece) if inner == 1)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of a protobuf message's fields. Raises ValueError for other bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            if position >= len(data):
                raise ValueError("the file is cut off, or no sentencepiece model")
            byte = data[position]
            position, value, shift = position + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or (varint() if key & 7 == 2 else len(data))
        if position + size > len(data):
            raise ValueError("the file is cut off, or no sentencepiece model")
        yield key >> 3, data[position : position + size]
        position += size
