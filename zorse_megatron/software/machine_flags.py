"""Stock's flags on a machine without a GPU, Transformer Engine, Apex or Megatron-LM's extensions.

Those that a command needs there are added, and those that cannot work are refused, by the rows
`machines` of `flags/flags.yaml`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.flags.scan import last_values
from zorse_megatron.flags.table import MachineRow, machine_rows
from zorse_megatron.software.rank_software import RankSoftware

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

    `has_plan`: torch's norms are made to support sequence parallelism then (`model.split_norms`).
    Raises FlagError with every flag in it that cannot work on a CPU.
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
            else "Install it (pip install 'zorse-megatron[gpu]'), or leave the flag out.",
        )
