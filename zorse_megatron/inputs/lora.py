"""LoRA: which matrices of each layer have an adapter, of which rank, and how it is scaled.

W x becomes W x + (alpha / rank) B A x with A [rank, inputs] and B [outputs, rank] (Hu et al. 2021,
arXiv 2106.09685). Only A and B are trained. Query, key, value, gate and up have adapters of their
own, though Megatron fuses their matrices, as published adapters have them apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from zorse_megatron.errors import Problem

if TYPE_CHECKING:
    from zorse_megatron.inputs.model import ModelShape

Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
TARGETS: tuple[Target, ...] = get_args(Target)
MLP_TARGETS: tuple[Target, ...] = ("gate", "up", "down")
LORA_FLAG = "--zorse-lora"
_USUAL = "rank=16,alpha=32,targets=q,k,v,o,gate,up,down"
_KEYS = ("rank", "alpha", "targets")
MAX_RANK = 4096
MODULE = ".lora."
"""In names of their parameters, and of tensors in checkpoints."""
ARGUMENT = "zorse_lora"
"""In a run's arguments, and in those that its checkpoints have, with the base beside the rest."""
RANDOM_BASE = "random:"
"""Before the seed of initial weights, in place of a checkpoint's digest."""


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """A matrix that may have an adapter."""

    inputs: int
    outputs: int
    in_attention: bool
    """Whether TP groups cut it by KV groups; others by columns of the MLP."""
    cuts_outputs: bool
    """Whether they cut its outputs, and so B; otherwise its inputs, and so A."""

    def parameters(self, rank: int) -> int:
        """Parameters of its adapter."""
        return rank * (self.inputs + self.outputs)

    def cut_parameters(self, rank: int) -> int:
        """Those of them of which each rank of a TP group has a part."""
        return rank * (self.outputs if self.cuts_outputs else self.inputs)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of a job; each layer has the same ones."""

    rank: int
    alpha: float
    targets: tuple[Target, ...]
    """In the order of `TARGETS`."""

    @property
    def scale(self) -> float:
        """What the adapters' results are multiplied by."""
        return self.alpha / self.rank

    def __str__(self) -> str:
        alpha = repr(self.alpha).removesuffix(".0")  # all digits: others read it again
        return f"rank={self.rank},alpha={alpha},targets={','.join(self.targets)}"

    def sizes(self, shape: "ModelShape") -> dict[Target, TargetSize]:
        """Return the matrices of a layer that have an adapter."""
        return {name: size for name, size in target_sizes(shape).items() if name in self.targets}

    def layer_parameters(self, shape: "ModelShape", tensor_parallel: int = 1) -> int:
        """Parameters of one layer's adapters on each rank of a TP group with equal parts."""
        return sum(
            size.parameters(self.rank)
            - size.cut_parameters(self.rank) * (tensor_parallel - 1) // tensor_parallel
            for size in self.sizes(shape).values()
        )

    def crossing_shares(self, shape: "ModelShape") -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the widths of A x beside a layer's, of matrices whose outputs TP groups cut, and
        of those whose inputs they cut; fused matrices have one A x."""
        sizes, share = self.sizes(shape), self.rank / shape.hidden_size
        fused = [
            sum(size.cuts_outputs and size.in_attention == in_attention for size in sizes.values())
            for in_attention in (True, False)
        ]
        rows = sum(not size.cuts_outputs for size in sizes.values())
        return tuple(share * count for count in fused if count), (share,) * rows


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name, or a tensor of a checkpoint, is one of adapters."""
    return MODULE in name


def target_sizes(shape: "ModelShape") -> dict[Target, TargetSize]:
    """Return the matrices of a layer that may have an adapter, in order."""
    hidden, ffn, query = shape.hidden_size, shape.ffn_hidden_size, shape.query_width
    one_of_two = shape.key_value_width // 2
    first = TargetSize(inputs=hidden, outputs=ffn, in_attention=False, cuts_outputs=True)
    of_query = TargetSize(inputs=hidden, outputs=query, in_attention=True, cuts_outputs=True)
    of_key = replace(of_query, outputs=one_of_two)
    return {
        "q": of_query,
        "k": of_key,
        "v": of_key,
        "o": TargetSize(inputs=query, outputs=hidden, in_attention=True, cuts_outputs=False),
        **({"gate": first} if shape.is_gated else {}),
        "up": first,
        "down": TargetSize(inputs=ffn, outputs=hidden, in_attention=False, cuts_outputs=False),
    }


def parse_lora(text: str | None, problems: list[Problem], *, where: str = LORA_FLAG) -> Lora | None:
    """Read `rank=16,alpha=32,targets=q,v`; None where a problem has been noted.

    >>> str(parse_lora("rank=8,alpha=16,targets=v,q", []))
    'rank=8,alpha=16,targets=q,v'
    """
    values = _values(text or "")
    found: list[tuple[str, str]] = []
    for key in values:
        if key not in _KEYS:
            found.append((f'"{key}"', f"{', '.join(_KEYS)} alone"))
    found += [(f"no {key}", f"all of {', '.join(_KEYS)}") for key in _KEYS if key not in values]
    found += [(f"{key} twice", "it once") for key in _KEYS if len(values.get(key, ())) > 1]
    rank = _last(values, "rank")
    is_rank = rank is not None and rank.isdecimal() and len(rank) <= len(str(MAX_RANK))
    if rank is not None and not (is_rank and 1 <= int(rank) <= MAX_RANK):
        found.append((f'rank "{rank}"', f"an integer of 1 to {MAX_RANK}"))
    alpha = _last(values, "alpha")
    if alpha is not None and not 0 < _number(alpha) < float("inf"):
        found.append((f'alpha "{alpha}"', "a number above 0"))
    targets = (_last(values, "targets") or "").split(",")
    found += _wrong_targets(targets) if "targets" in values else ()
    remedy = f"Such as {where} {_USUAL}."
    problems += [
        Problem(where=where, found=seen, expected=wanted, remedy=remedy) for seen, wanted in found
    ]
    if found or rank is None or alpha is None:
        return None
    return Lora(
        rank=int(rank),
        alpha=_number(alpha),
        targets=tuple(each for each in TARGETS if each in targets),
    )


def misfits(lora: Lora, shape: "ModelShape", *, where: str = LORA_FLAG) -> Iterator[Problem]:
    """Yield what the model of a command has not."""
    known = target_sizes(shape)
    of_mlp = [name for name in lora.targets if name in MLP_TARGETS]
    if shape.experts is not None and of_mlp:
        yield Problem(
            where=where,
            found=f"targets {','.join(of_mlp)}, and {shape.experts.num_experts} experts in a layer",
            expected="targets of attention alone: q,k,v,o",
            remedy="Leave the others out: experts stay as they are, and have no adapters here.",
        )
    for name in lora.targets:
        if name not in known:
            yield Problem(
                where=where,
                found=f"the target {name}, which the model has not",
                expected=f"some of {', '.join(known)}",
                remedy="Leave it out; without a gate, up is the first matrix of the MLP.",
            )


def _values(text: str) -> dict[str, list[str]]:
    """Key -> its values; commas separate keys and the words of one."""
    values: dict[str, list[str]] = {}
    last: list[str] = []
    for piece in text.split(",") if text else ():
        key, equals, value = piece.partition("=")
        if equals:
            last = values.setdefault(key.strip(), [])
            last.append(value.strip())
        elif last:
            last[-1] += f",{piece.strip()}"
        else:
            values.setdefault(piece, [])
    return values


def _last(values: dict[str, list[str]], key: str) -> str | None:
    return values[key][-1] if values.get(key) else None


def _number(text: str) -> float:
    try:
        return 0.0 if "_" in text else float(text)
    except ValueError:
        return 0.0


def _wrong_targets(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(names):
        if name not in TARGETS:
            yield f'the target "{name}"', f"some of {', '.join(TARGETS)}"
        elif names.count(name) > 1:
            yield f"the target {name} twice", "it once"
