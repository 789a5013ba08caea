"""Words for flags of the table: for each one values that differ from its default."""

from collections.abc import Iterator

from zorse_megatron.flags.table import Flag, flags

# Megatron evaluates these texts itself.
_OPAQUE = {
    "window_size": "(3,0)",
    "onnx_safe": "1",
    "cuda_graph_scope_deprecated": "attn",
    "cuda_graph_modules": "attn",
}


def words_of(flag: Flag) -> Iterator[list[str]]:
    """Yield ways to give the flag, each with all that it needs."""
    if flag.kind != "store":
        yield from ([spelling] for spelling in flag.spellings)
        return
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    for value in _values(flag):
        yield [flag.spellings[-1], *[value] * count]


def _values(flag: Flag) -> Iterator[str]:
    if flag.choices is not None:
        yield from map(str, flag.choices)
    elif flag.type == "int":
        yield from ("3", "0", "1")
    elif flag.type == "float":
        yield from ("0.25", "-1e-3", "0")
    elif flag.type == "opaque":
        yield _OPAQUE.get(flag.name, "2")
    else:
        yield "some text"


def all_words() -> list[list[str]]:
    """Every flag, in several ways."""
    return [words for flag in flags() for words in words_of(flag)]
