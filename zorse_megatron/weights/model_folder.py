"""A folder with a Hugging Face model: its tensors in safetensors files, checked and never executed.

All that is wrong is found from the files' headers, before a tensor is read.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.files.json_text import read_json
from zorse_megatron.files.read_write import MAX_INPUT_BYTES, read_input, write_text
from zorse_megatron.inputs.hugging_face import (
    CONFIG_FILE,
    HuggingFaceModel,
    config_path,
    parse_config,
)
from zorse_megatron.weights.convertible import conversion_problems
from zorse_megatron.weights.names import EXPERTS, Part, WholeTensor, whole_tensors

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
IN_FILES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IN_CONFIG = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AS_PUBLISHED = "Take the files that are published."
# Tensors of older files that transformers computes itself.
_COMPUTED = ".rotary_emb.inv_freq"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a folder's `config.json` says."""

    folder: Path
    model: HuggingFaceModel
    kind: str
    """Its `model_type`."""
    vocab_size: int
    """Rows of its table of tokens."""
    dtype: str | None
    """As in safetensors files: BF16 and the like; None: the file does not say."""
    has_head: bool
    """Whether its output layer is a tensor of its own."""
    left_out: tuple[str, ...]
    """How names of tensors begin that are not converted: those of multi-token prediction."""

    def tensors(self) -> list[WholeTensor]:
        """Return all tensors of the model."""
        return list(whole_tensors(self.model.shape, self.vocab_size, EXPERTS.get(self.kind)))


def describe(folder: Path) -> Description:
    """Read `config.json`. Raises ModelError with all that keeps its weights from conversion."""
    path = config_path(folder)
    if path == folder:
        where, found = str(folder), "no folder" if not folder.is_dir() else "no config.json in it"
        expected = "a folder with config.json and safetensors files"
        problem = Problem(where=where, found=found, expected=expected, remedy="Correct the path.")
        raise ModelError("The model cannot be converted", [problem])
    data = _text(path)
    model = parse_config(data, source=str(path))
    value, _ = read_json(data, str(path), CONFIG_FILE)
    problems = conversion_problems(value, model, source=str(path))
    if problems:
        raise ModelError(f"{path}: its weights cannot be converted", problems)
    name = value.get("dtype") or value.get("torch_dtype")
    label = _IN_CONFIG.get(str(name).removeprefix("torch."))
    if name is not None and label is None:
        raise ModelError.of(
            f"{path}: its weights cannot be converted",
            where=f"{path}: dtype",
            found=repr(name)[:40],
            expected=" or ".join(_IN_CONFIG),
            remedy="Take weights that are not quantized, or correct it.",
        )
    predicted = value.get("num_nextn_predict_layers") or 0
    return Description(
        folder=folder,
        model=model,
        kind=value["model_type"],
        vocab_size=value["vocab_size"],
        dtype=label,
        has_head=not model.shape.tied_embeddings,
        left_out=tuple(f"model.layers.{model.shape.num_layers + n}." for n in range(predicted)),
    )


class ModelFiles:
    """The tensors in a folder's safetensors files."""

    def __init__(self, description: Description) -> None:
        """Read all headers. Raises ModelError with everything that does not fit `config.json`."""
        self._folder = description.folder
        self._file_of: dict[str, str] = {}
        self._dtype_of: dict[str, str] = {}
        self._shape_of: dict[str, tuple[int, ...]] = {}
        self._open: tuple[str, Any] | None = None
        problems = [
            *self._read_headers(),
            *unreadable_companions(self._folder, "tokenizer"),
            *_tokenizer_problems(description),
        ]
        if not problems:
            problems += self._compare(description)
        if not problems:
            problems += self._other_head(description)
        if problems:
            raise ModelError(f"{self._folder} cannot be imported", problems)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        return IN_FILES[self._dtype_of[name]]

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises OSError, SafetensorError."""
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(self._folder / file, framework="pt"))
        tensor: torch.Tensor = self._open[1].get_tensor(name)
        return tensor

    def _read_headers(self) -> Iterator[Problem]:
        index, problems = self._index()
        yield from problems
        # Mistral's own format, consolidated.safetensors, may be beside them.
        present = sorted(path.name for path in self._folder.glob("model*.safetensors"))
        listed = sorted(set(index.values())) if index is not None else [SINGLE]
        missing = [name for name in listed if not (self._folder / name).is_file()]
        if missing and not problems:
            others = sorted(
                path.name for path in self._folder.iterdir() if path.suffix in _WEIGHT_FILES
            )
            yield self._problem(
                f"no {', '.join(missing[:4])}{' ...' * (len(missing) > 4)}"
                + f" (there is {', '.join(others[:4])})" * bool(others),
                "the safetensors files of the model",
                "Download all of them; files that hold pickles (.bin, .pt) are never read.",
            )
        if extra := [name for name in present if name not in listed]:
            yield self._problem(
                f"{', '.join(extra[:4])}, which {INDEX if index is not None else SINGLE} knows not",
                "the files of one model alone",
                "Remove what belongs to another.",
            )
        for name in listed:
            if name not in missing:
                yield from self._read_header(name)
        for tensor, file in (index or {}).items():
            if not missing and self._file_of.get(tensor) != file:
                yield self._problem(
                    f"{tensor} is not in {file}", f"what {INDEX} says", _AS_PUBLISHED
                )

    def _read_header(self, name: str) -> Iterator[Problem]:
        try:
            with safe_open(self._folder / name, framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118 - it is no mapping
                    if tensor in self._file_of:
                        yield self._problem(
                            f"{tensor} in {self._file_of[tensor]} and {name}", "once", _AS_PUBLISHED
                        )
                    self._file_of[tensor] = name
                    part = file.get_slice(tensor)
                    self._dtype_of[tensor] = str(part.get_dtype())
                    self._shape_of[tensor] = tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            yield self._problem(
                f"{name}: {error}", "a whole safetensors file", "Download it again."
            )

    def _index(self) -> tuple[dict[str, str] | None, list[Problem]]:
        """Return tensor -> file, None without an index."""
        path = self._folder / INDEX
        if not path.is_file():
            return None, []
        value, problems = read_json(_text(path), str(path), CONFIG_FILE)
        files = value.get("weight_map") if isinstance(value, dict) else None
        if not (isinstance(files, dict) and files and all(map(_is_file_name, files.values()))):
            outside = [each for each in (files or {}).values() if not _is_file_name(each)] if (
                isinstance(files, dict)
            ) else []  # fmt: skip
            found = repr(outside[0])[:60] if outside else "no weight_map"
            expected = "tensors, each with a file of this folder, *.safetensors"
            problems.append(self._problem(f"{INDEX}: {found}", expected, _AS_PUBLISHED))
            return {}, problems
        return dict(files), problems

    def _compare(self, description: Description) -> Iterator[Problem]:
        """Compare what the files have with what `config.json` says."""
        wanted = {part.name: part for each in description.tensors() for part in each.parts}
        shapes = self._shape_of
        for name in [name for name in wanted if name not in shapes][:8]:
            expected = f"a tensor of {wanted[name].shape}"
            yield self._problem(f"no tensor {name}", expected, _AS_PUBLISHED)
        allowed = () if description.has_head else (_HEAD,)
        unknown = [
            name for name in shapes
            if name not in wanted and name not in allowed and not name.endswith(_COMPUTED)
            and not name.startswith(description.left_out)
        ]  # fmt: skip
        if unknown:
            yield self._problem(
                f"{len(unknown)} tensors beside the model's: {', '.join(sorted(unknown)[:4])}",
                "those of a published model: no adapters, no quantization, experts one by one",
                "Convert it to plain weights first, with the tool that made it.",
            )
        yield from self._bad_tensors(description, wanted)

    def _bad_tensors(
        self, description: Description, wanted: Mapping[str, Part]
    ) -> Iterator[Problem]:
        shapes = self._shape_of
        known = [each for each in wanted.values() if each.name in shapes]
        for part in [each for each in known if shapes[each.name] != each.shape][:8]:
            yield self._problem(
                f"{part.name}: {shapes[part.name]}", f"{part.shape}, by config.json", _AS_PUBLISHED
            )
        fp32 = {part.name for part in known if part.may_be_fp32}
        types = {self._dtype_of[name] for name in wanted if name in shapes and name not in fp32}
        if description.dtype is None and types <= set(IN_FILES) and len(types) > 1:
            yield self._problem(
                f"tensors in {' and '.join(sorted(types))}", "one type", "Convert them to one."
            )
        expected = {description.dtype} if description.dtype else set(IN_FILES)
        types |= {self._dtype_of[name] for name in fp32} - {"F32"}
        if other := sorted(types - expected):
            first = next(part.name for part in known if self._dtype_of[part.name] in other)
            yield self._problem(
                f"tensors in {', '.join(other)}: {first}",
                f"{' or '.join(sorted(expected))}"
                + ", by config.json" * (description.dtype is not None),
                "Take weights that are not quantized, or correct its dtype.",
            )

    def _other_head(self, description: Description) -> Iterator[Problem]:
        """Say if a model whose tables are tied has another output layer nevertheless."""
        if description.has_head or _HEAD not in self._file_of:
            return
        kinds = {self._dtype_of[_HEAD], self._dtype_of[_EMBEDDING]}
        bits = torch.uint8  # nan equals itself
        if len(kinds) > 1 or not torch.equal(
            self.read(_HEAD).view(bits), self.read(_EMBEDDING).view(bits)
        ):
            yield self._problem(
                f"{_HEAD} differs from {_EMBEDDING}",
                "the same values, as config.json ties them (tie_word_embeddings)",
                "Set tie_word_embeddings to what the model was trained with.",
            )

    def _problem(self, found: str, expected: str, remedy: str) -> Problem:
        return Problem(where=str(self._folder), found=found, expected=expected, remedy=remedy)


def _is_file_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and value.endswith(".safetensors")
        and "/" not in value
        and "\\" not in value
        and "\0" not in value
    )


def _text(path: Path) -> bytes:
    """Read a text file of a model. Raises ModelError."""
    try:
        return read_input(path, max_bytes=MAX_INPUT_BYTES)
    except OSError as error:
        raise ModelError.of(
            "The model cannot be converted",
            where=str(path),
            found=str(error.strerror or error),
            expected="a file that can be read",
            remedy="Correct the path, or its permissions.",
        ) from error


def _tokenizer_problems(description: Description) -> Iterator[Problem]:
    """Say if a token has no row in the table."""
    path = description.folder / _TOKENIZER
    if not path.is_file():
        return
    try:
        value = json.loads(path.read_bytes())
        tokens = value["model"].get("vocab", {})
        listed = tokens.values() if isinstance(tokens, dict) else range(len(tokens))
        numbers = [*listed, *(each["id"] for each in value.get("added_tokens") or ())]
        if not all(type(each) is int and each >= 0 for each in numbers):
            raise TypeError("a token's number is no whole number")
        largest = max(numbers, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield Problem(
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            expected="a tokenizer of Hugging Face's tokenizers",
            remedy=_AS_PUBLISHED,
        )
        return
    if largest >= description.vocab_size:
        yield Problem(
            where=str(path),
            found=f"token {largest}",
            expected=f"numbers below {description.vocab_size}, the rows of the model's table",
            remedy="Take the tokenizer of this model.",
        )


# Writing one.


def write_model(
    folder: Path,
    parts: Sequence[Part],
    tensors: Iterator[tuple[str, torch.Tensor]],
    *,
    types: Mapping[str, torch.dtype],
    shard_bytes: int,
) -> list[Path]:
    """Write safetensors files of at most `shard_bytes`, or one tensor, and their index.

    `parts`: all tensors, in the order in which `tensors` gives them; `types`: by name. Raises
    OSError.
    """
    num_bytes = {part.name: math.prod(part.shape) * types[part.name].itemsize for part in parts}
    shards = list(_shards(parts, num_bytes, shard_bytes))
    names = [
        SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard, tensors, types)
    if len(shards) > 1:
        files = {
            part.name: name for name, shard in zip(names, shards, strict=True) for part in shard
        }
        index = {
            "metadata": {"total_size": sum(num_bytes.values())},
            "weight_map": dict(sorted(files.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        names.append(INDEX)
    return [folder / name for name in names]


def unreadable_companions(source: Path, prefix: str = "") -> list[Problem]:
    """Say which of the files that `copy_companions` copies cannot be read."""
    return [
        Problem(
            where=str(path),
            found="a file that cannot be read, or a link to none",
            expected="configuration or tokenizer of the model",
            remedy="Correct its permissions, or download it again.",
        )
        for path in _companions(source)
        if path.name.startswith(prefix) and not (path.is_file() and os.access(path, os.R_OK))
    ]


def copy_companions(source: Path, folder: Path, dtype: torch.dtype) -> list[Path]:
    """Copy tokenizer and configuration of the model; its dtype becomes that of the weights.

    `config.json` comes last, in one step. Raises OSError, NotWritten.
    """
    written = []
    for path in _companions(source):
        shutil.copyfile(path, folder / path.name)
        written.append(folder / path.name)
    value = json.loads((source / CONFIG).read_bytes())
    key = "dtype" if "dtype" in value else "torch_dtype"
    value[key] = str(dtype).removeprefix("torch.")
    return [*written, write_text(folder / CONFIG, json.dumps(value, indent=2) + "\n")]


def _companions(source: Path) -> Iterator[Path]:
    for path in sorted(source.iterdir()):
        is_text = path.suffix in (".json", ".txt", ".model", ".jinja")
        is_other = path.name == CONFIG or path.name.endswith(".index.json")
        if is_text and not is_other and not path.is_dir():
            yield path


def _shards(
    parts: Sequence[Part], num_bytes: Mapping[str, int], shard_bytes: int
) -> Iterator[list[Part]]:
    shard: list[Part] = []
    filled = 0
    for part in parts:
        size = num_bytes[part.name]
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(part)
        filled += size
    yield shard


def write_tensors(
    path: Path,
    shard: Sequence[Part],
    tensors: Iterator[tuple[str, torch.Tensor]],
    types: Mapping[str, torch.dtype],
) -> None:
    """Write one file; source of the layout: the README of huggingface/safetensors."""
    labels = {kind: label for label, kind in IN_FILES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in shard:
        dtype = types[part.name]
        start, end = end, end + math.prod(part.shape) * dtype.itemsize
        described = {"dtype": labels[dtype], "shape": part.shape, "data_offsets": (start, end)}
        header[part.name] = described
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in shard:
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape), tensor.dtype) == (part.name, part.shape, types[name])
            file.write(tensor.contiguous().view(torch.uint8).reshape(-1).numpy())
        file.flush()
        os.fsync(file.fileno())
