"""Stock flags on a GPU where Transformer Engine, Apex or Megatron-LM's extensions are missing.

megatron-core 0.19 stops, or fails in the first forward pass, where they are asked for by default
and not installed (`core/transformer/torch_norm.py:WrappedTorchNorm`,
`core/tensor_parallel/layers.py:ColumnParallelLinear`, `core/fusions/fused_softmax.py`,
`core/transformer/transformer_config.py:TransformerConfig.__post_init__`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zorse_megatron.errors import Problem
from zorse_megatron.flags.scan import last_values
from zorse_megatron.software.needed_flags import NeededFlag, lacking
from zorse_megatron.software.rank_software import RankSoftware

NORMS = "apex.normalization"
WEIGHT_GRADIENT = "fused_weight_gradient_mlp_cuda"
SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"
FUSED_ADAM = "apex.optimizers"
EXTENSIONS = (NORMS, WEIGHT_GRADIENT, SOFTMAX, FUSED_ADAM)
"""Modules that a rank looks for."""

_IMPL, _LOCAL = "--transformer-impl", "local"
_ATTENTION = "--attention-backend"
_NO_ENGINE = "Transformer Engine is not installed"


@dataclass(frozen=True, kw_only=True)
class GpuCommand:
    """Megatron's words for a rank with a GPU."""

    words: tuple[str, ...]
    added: tuple[NeededFlag, ...]
    transformer_impl: str | None
    """None: the command does not say."""
    refused: tuple[Problem, ...] = ()
    """Flags in it that need Transformer Engine where there is none."""


def with_gpu_flags(argv: Sequence[str], found: RankSoftware) -> GpuCommand:
    """Return `argv` followed by the flags without which it cannot run there."""
    words = (_IMPL, _ATTENTION, *(each.flag for each in _every()))
    given = {flag: value or "" for flag, value in last_values(argv, words).items()}
    added = lacking(list(_needed(given, found)), given)
    impl = next((each.value for each in added if each.flag == _IMPL), given.get(_IMPL))
    return GpuCommand(
        words=(*argv, *(word for each in added for word in each.words)),
        added=tuple(added),
        transformer_impl=impl,
        refused=() if found.transformer_engine is not None else tuple(_refused(given)),
    )


def told(added: Sequence[NeededFlag]) -> str | None:
    """One line on what was added and why; None if nothing was."""
    if not added:
        return None
    reasons: dict[str, list[str]] = {}
    for each in added:
        reasons.setdefault(each.why, []).extend(each.words)
    listed = "; ".join(f"{' '.join(words)} ({why})" for why, words in reasons.items())
    return f"added to Megatron's flags: {listed}"


def _needed(given: dict[str, str], found: RankSoftware) -> Iterator[NeededFlag]:
    has_engine = found.transformer_engine is not None
    is_local = not has_engine or given.get(_IMPL) == _LOCAL
    if not has_engine:
        yield _LOCAL_IMPL
        yield _NO_ROPE
    if is_local and NORMS not in found.extensions:
        yield _NO_PERSIST
    if is_local and SOFTMAX not in found.extensions:
        yield _NO_SOFTMAX
    if WEIGHT_GRADIENT not in found.extensions:
        yield _NO_ACCUMULATION


def _every() -> tuple[NeededFlag, ...]:
    return (_LOCAL_IMPL, _NO_ROPE, _NO_PERSIST, _NO_SOFTMAX, _NO_ACCUMULATION)


_LOCAL_IMPL = NeededFlag(flag=_IMPL, value=_LOCAL, why=_NO_ENGINE)
_NO_ROPE = NeededFlag(flag="--no-rope-fusion", why=_NO_ENGINE)
_NO_PERSIST = NeededFlag(flag="--no-persist-layer-norm", why="Apex is not installed")
_NO_SOFTMAX = NeededFlag(
    flag="--no-masked-softmax-fusion", why="Megatron-LM's softmax extensions are not installed"
)
_NO_ACCUMULATION = NeededFlag(
    flag="--no-gradient-accumulation-fusion",
    why=f"Apex's extension {WEIGHT_GRADIENT} is not installed",
)


def _refused(given: dict[str, str]) -> Iterator[Problem]:
    remedy = "Install it (pip install 'zorse-megatron[gpu]'), or leave the flag out."
    for flag, harmless in ((_IMPL, (_LOCAL,)), (_ATTENTION, ("auto", "unfused"))):
        if flag in given and given[flag] not in harmless:
            yield Problem(
                where=flag,
                found=f"{given[flag] or 'no value'}, while {_NO_ENGINE}",
                expected=" or ".join(harmless),
                remedy=remedy,
            )
