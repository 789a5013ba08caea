"""Mixture of experts: how many feed-forward blocks each layer has, and how many a token passes.

A router gives each token to some of the experts, and sums up their results by its scores (Shazeer
et al. 2017, arXiv 1701.06538). All layers of a model have the same experts, and each rank holds all
of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.errors import Problem

NUM_EXPERTS_FLAG = "--num-experts"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer."""

    num_experts: int
    per_token: int
    """Experts that a token passes."""
    ffn_hidden_size: int
    """Width of one expert."""
    shared_ffn_hidden_size: int = 0
    """Width of the shared expert, which every token passes; 0 without one."""
    has_shared_gate: bool = False
    """Whether a gate of each token scales what the shared expert gives."""
    scores_all: bool = False
    """Whether the scores of all experts are normalized, and not those of the chosen alone
    (`--moe-router-pre-softmax`)."""

    @property
    def held_width(self) -> int:
        """Columns of all experts together, the shared one included."""
        return self.num_experts * self.ffn_hidden_size + self.shared_ffn_hidden_size

    @property
    def active_width(self) -> int:
        """Columns of the experts that a token passes, the shared one included."""
        return self.per_token * self.ffn_hidden_size + self.shared_ffn_hidden_size

    @property
    def blocks_per_token(self) -> int:
        """Experts that a token passes, the shared one included."""
        return self.per_token + bool(self.shared_ffn_hidden_size)

    def router_parameters(self, hidden_size: int) -> int:
        """Elements of the router's matrix and of the gate of the shared expert."""
        return hidden_size * (self.num_experts + self.has_shared_gate)

    def flags(self) -> tuple[dict[str, int | str], tuple[str, ...]]:
        """Return Megatron's flags of them: with values, and switches."""
        valued: dict[str, int | str] = {
            NUM_EXPERTS_FLAG: self.num_experts,
            "--moe-router-topk": self.per_token,
            "--moe-ffn-hidden-size": self.ffn_hidden_size,
            "--moe-token-dispatcher-type": "alltoall",
        }
        if self.shared_ffn_hidden_size:
            valued["--moe-shared-expert-intermediate-size"] = self.shared_ffn_hidden_size
        gate = ("--moe-shared-expert-gate",) if self.has_shared_gate else ()
        return valued, (*gate, *(("--moe-router-pre-softmax",) if self.scores_all else ()))


def experts_problems(experts: Experts, *, linear_bias: bool) -> Iterator[Problem]:
    """Yield what does not fit together. `linear_bias`: whether linear layers have biases."""
    if experts.per_token > experts.num_experts:
        yield Problem(
            where="--moe-router-topk",
            found=f"{experts.per_token} of {experts.num_experts} experts",
            expected="at most as many as there are",
            remedy="Correct one of the two.",
        )
    if experts.per_token == 1 and not experts.scores_all:
        yield Problem(
            where="--moe-router-topk",
            found="1 expert for a token, whose score among the chosen is always 1",
            expected="scores among all experts, as Megatron has them for one",
            remedy="Add --moe-router-pre-softmax.",
        )
    if experts.has_shared_gate and not experts.shared_ffn_hidden_size:
        yield Problem(
            where="--moe-shared-expert-gate",
            found="the gate of a shared expert that is not there",
            expected="it beside --moe-shared-expert-intermediate-size",
            remedy="Add that, or leave the gate out.",
        )
    if experts.shared_ffn_hidden_size and linear_bias:
        yield Problem(
            where="--moe-shared-expert-intermediate-size",
            found="a shared expert in a model with biases",
            expected="one without, as Megatron's shared experts have none",
            remedy="Add --disable-bias-linear.",
        )


def no_tp_with_experts(where: str, found: str) -> Problem:
    """Why a TP group is refused."""
    return Problem(
        where=where,
        found=f"{found} ranks of a tensor-parallel group, for a model with experts",
        expected="1: each rank holds whole experts",
        remedy="Leave it out; parameters, gradients and state are sharded in groups all the same.",
    )
