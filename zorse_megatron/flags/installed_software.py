"""What is installed on ranks, as they report it, and the flags that Megatron needs for it.

Without torch: `adapter.start_checks` asks, everything here decides.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.flags.command import last_values
from zorse_megatron.flags.table import MachineRow, machine_rows
from zorse_megatron.gpus.gpu import BF16_FROM, FLASH_FROM, Capability, spell


@dataclass(frozen=True, kw_only=True)
class SeenGpu:
    """The GPU that a rank takes."""

    name: str
    """As the driver calls it."""
    uuid: str
    capability: Capability


@dataclass(frozen=True, kw_only=True)
class RankSoftware:
    """One rank's view; what is not installed is None or not among `extensions`."""

    rank: int
    node: str
    gpu: SeenGpu | None
    """None: no GPU is visible."""
    torch: str
    """Version of the build, such as "2.13.0+cu130"."""
    archs: tuple[str, ...]
    """What `torch.cuda.get_arch_list()` returns."""
    nccl: str | None
    transformer_engine: str | None
    flash_attention: str | None
    extensions: tuple[str, ...]
    """Those CUDA extensions that `installed_software` knows and that are installed."""
    unusable_gpus: str | None = None
    """The GPUs that the machine has and torch cannot use, and why; None: there are none such."""
    missing_to_compile: tuple[str, ...] = ()
    """What Triton and torch.compile need there and do not find."""
    host_id: str | None = None
    """What NCCL takes for the name of the host, where that is set for this rank (NCCL_HOSTID)."""
    transformer_impl: str | None = None
    """What its command says or was given for --transformer-impl; None: stock's default."""
    refused: tuple[Problem, ...] = ()
    """Flags of its command that cannot work there."""

    def to_json(self) -> str:
        """Write it for other ranks, in one line."""
        return _JSON.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "RankSoftware":
        """Read what `to_json` wrote."""
        return _JSON.validate_json(text)


_JSON = TypeAdapter(RankSoftware)  # one rank reads what all ranks write

# What rank 0 prints of the GPUs and of what is installed: one line each.


ENGINE_ADAM = "Transformer Engine's FusedAdam"


def found_lines(ranks: Sequence[RankSoftware]) -> list[str]:
    """GPUs, bf16, attention, Transformer Engine, Apex and Adam; nothing without a GPU."""
    seen = [rank for rank in ranks if rank.gpu is not None]
    return list(_lines(seen)) if seen else []


def _lines(ranks: Sequence[RankSoftware]) -> Iterator[str]:
    gpus = [rank.gpu for rank in ranks if rank.gpu is not None]
    counts = Counter((gpu.name, gpu.capability) for gpu in gpus)
    listed = ", ".join(
        f"{count} x {name} (compute capability {spell(capability)})"
        for (name, capability), count in counts.items()
    )
    first = ranks[0]
    yield f"GPUs: {listed}; torch {first.torch} has code for all of them"
    capabilities = list(dict.fromkeys(gpu.capability for gpu in gpus))
    yield f"bf16: {_which(capabilities, BF16_FROM)}"
    yield f"attention: {_attention(first, capabilities)}"
    yield f"Transformer Engine: {first.transformer_engine or 'not installed'}"
    yield f"Apex: {'installed' if _has_apex(first) else 'not installed'}"
    yield f"Adam: {adam_of(first)}"


def adam_of(rank: RankSoftware) -> str:
    """The Adam that Megatron takes (`megatron/core/optimizer/__init__.py`)."""
    if rank.transformer_engine is not None:
        return ENGINE_ADAM
    if FUSED_ADAM in rank.extensions:
        return "Apex's FusedAdam"
    return "torch's AdamW (neither Transformer Engine nor Apex is installed)"


def _has_apex(rank: RankSoftware) -> bool:
    return NORMS in rank.extensions or FUSED_ADAM in rank.extensions


def _which(capabilities: Sequence[Capability], least: Capability) -> str:
    without = [spell(each) for each in capabilities if each < least]
    if not without:
        return "on all GPUs"
    if len(without) == len(capabilities):
        return f"on none of the GPUs (compute capability {spell(least)} and later have it)"
    return f"on all GPUs but those of compute capability {' and '.join(without)}"


def _attention(rank: RankSoftware, capabilities: Sequence[Capability]) -> str:
    if rank.transformer_impl == "local" or rank.transformer_engine is None:
        return "unfused, the only one of --transformer-impl local: scores take memory"
    flash = f"flash-attn {rank.flash_attention}" if rank.flash_attention else "cuDNN's fused one"
    return f"Transformer Engine's choice; {flash}: {_which(capabilities, FLASH_FROM)}"


# Stock's flags on a machine without a GPU, Transformer Engine, Apex or Megatron-LM's extensions.
#
# Those that a command needs there are added, and those that cannot work are refused, by the rows
# `machines` of `flags/flags.yaml`.


NORMS, FUSED_ADAM = "apex.normalization", "apex.optimizers"
EXTENSIONS = (
    NORMS,
    "fused_weight_gradient_mlp_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
    FUSED_ADAM,
)
"""Modules that a rank looks for."""

_GPU, _ENGINE, _IMPL = "GPU", "transformer_engine", "--transformer-impl"


@dataclass(frozen=True, kw_only=True)
class MachineCommand:
    """Megatron's words for a rank."""

    words: tuple[str, ...]
    added: tuple[MachineRow, ...]
    """Rows whose flag was added."""
    transformer_impl: str | None
    """None: the command does not say."""
    refused: tuple[Problem, ...]
    """Flags in it that cannot work there."""

    @property
    def told(self) -> str | None:
        """One line on what was added and why; None if nothing was."""
        reasons: dict[str, list[str]] = {}
        for row in self.added:
            reasons.setdefault(row.why, []).extend(row.words)
        listed = "; ".join(f"{' '.join(words)} ({why})" for why, words in reasons.items())
        return f"added to Megatron's flags: {listed}" if listed else None


def with_cpu_flags(argv: Sequence[str], *, has_plan: bool = False) -> list[str]:
    """Return `argv` (without the program) followed by the CPU flags that it lacks.

    `has_plan`: torch's norms are made to support sequence parallelism then
    (`adapter.model.uneven_tp_shards`). Raises FlagError with every flag in it that cannot work on a
    CPU.
    """
    command = _fitted(argv, {_GPU}, passed=("--sequence-parallel",) if has_plan else ())
    if command.refused:
        raise FlagError("These flags cannot work without a GPU", command.refused)
    return list(command.words)


def with_gpu_flags(argv: Sequence[str], found: RankSoftware) -> MachineCommand:
    """Return `argv` followed by the flags without which it cannot run there."""
    lacking = set(EXTENSIONS) - set(found.extensions)
    return _fitted(argv, lacking | ({_ENGINE} if found.transformer_engine is None else set()))


def _fitted(
    argv: Sequence[str], lacking: Collection[str], passed: Collection[str] = ()
) -> MachineCommand:
    """`passed`: flags that are not refused."""
    rows = [row for row in machine_rows() if row.without in lacking]
    words = {_IMPL, *(row.flag for row in rows)}
    given = {flag: value or "" for flag, value in last_values(argv, words).items()}
    added = [row for row in rows if row.added and row.flag not in given]
    impl = next((row.value for row in added if row.flag == _IMPL), given.get(_IMPL))
    is_local = impl == "local" or _ENGINE in lacking
    added = [row for row in added if is_local or not row.of_local_layers]
    return MachineCommand(
        words=(*argv, *(word for row in added for word in row.words)),
        added=tuple(added),
        transformer_impl=impl,
        refused=tuple(_refused([row for row in rows if row.flag not in passed], given)),
    )


def _refused(rows: Sequence[MachineRow], given: Mapping[str, str]) -> Iterator[Problem]:
    for row in rows:
        if row.flag not in given or row.added is True or given[row.flag] in row.fine:
            continue
        value, is_cpu = given[row.flag], row.without == _GPU
        yield Problem(
            where=row.flag,
            found=value or "the flag" if is_cpu else f"{value or 'no value'}, while {row.why}",
            expected=" or ".join(row.fine) or "no such flag",
            remedy=f"Leave it out or run on a GPU: {row.why}."
            if is_cpu
            else "Install it (docs/gpus.md), or leave the flag out.",
        )
