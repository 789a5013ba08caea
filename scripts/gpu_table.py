"""The table of docs/gpus.md: which GPUs run with which builds of torch, and what runs there."""

from collections.abc import Iterator

from zorse_megatron.flags.torch_builds import BUILDS, runs_on
from zorse_megatron.gpus.gpu import BF16_FROM, FLASH_FROM, TRITON_FROM, Capability, spell
from zorse_megatron.gpus.known_gpus import CAPABILITIES

_HEADINGS = (
    "Compute capability",
    "Kinds of GPU",
    "torch 2.13",
    "torch 2.12",
    "torch 2.11",
    "bf16",
    "Flash attention (Transformer Engine)",
    "Shard kernels",
)


def support_table() -> str:
    """A table in Markdown: a row for each compute capability of the well-known kinds."""
    rows = [_HEADINGS, tuple("---" for _ in _HEADINGS)]
    rows += [tuple(_row(each)) for each in sorted(set(CAPABILITIES.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(capability: Capability) -> Iterator[str]:
    yield spell(capability)
    yield ", ".join(kind for kind, each in CAPABILITIES.items() if each == capability)
    for heading in _HEADINGS[2:5]:
        yield ", ".join(_builds(heading.removeprefix("torch "), capability)) or "none"
    yield _from(capability, BF16_FROM)
    yield _from(capability, FLASH_FROM)
    yield "Triton" if capability >= TRITON_FROM else "plain torch"


def _builds(torch: str, capability: Capability) -> Iterator[str]:
    for build in BUILDS:
        if build.torch == torch and runs_on(build.archs, capability):
            yield f"**{build.cuda}**" if build.is_default else build.cuda


def _from(capability: Capability, least: Capability) -> str:
    return "yes" if capability >= least else "no"
