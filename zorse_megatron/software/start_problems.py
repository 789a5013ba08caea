"""What keeps ranks from training, as far as their GPUs and what is installed there tell."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.schema.gpus.compute_capability import BF16_FROM, Capability, spell
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.software.rank_software import RankSoftware
from zorse_megatron.software.torch_builds import install_advice, runs_on

_MAX_LISTED = 8


class StartError(ZorseError):
    """The ranks cannot train on their GPUs with what is installed there."""

    def __init__(self, problems: Sequence[Problem], *, is_of_one_rank: bool) -> None:
        super().__init__("The ranks cannot train with what is installed", problems)
        self.is_of_one_rank = is_of_one_rank


def refuse_start(
    ranks: Sequence[RankSoftware], dtypes: Sequence[ComputeDtype] = (), *, sees_all: bool
) -> None:
    """Raise StartError with all that is wrong.

    `dtypes`: rank -> what it computes in. `sees_all`: whether these are all ranks of the job, and
    each of them knows of the others.
    """
    problems = start_problems(ranks, dtypes)
    if problems:
        raise StartError(problems, is_of_one_rank=not sees_all)


def start_problems(
    ranks: Sequence[RankSoftware], dtypes: Sequence[ComputeDtype] = ()
) -> list[Problem]:
    """Everything that is wrong, ranks with the same problem together."""
    return [
        *_refused(ranks),
        *_without_gpu(ranks),
        *_without_code(ranks),
        *_without_bf16(ranks, dtypes),
        *_shared(ranks),
        *_different(ranks, "torch", lambda rank: rank.torch),
        *_different(ranks, "NCCL", lambda rank: rank.nccl),
        *_different(ranks, "--transformer-impl", _impl),
    ]


def _refused(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    """Flags; where they work on other ranks, with the ranks on which they do not."""
    refusing = [rank for rank in ranks if rank.refused]
    for same in _grouped(refusing, lambda rank: rank.refused):
        on_some = f" ({_ranks(same)})" if len(same) < len(ranks) else ""
        for problem in same[0].refused:
            yield replace(problem, where=f"{problem.where}{on_some}")


def _without_gpu(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    lacking = [rank for rank in ranks if rank.gpu is None]
    if lacking and len(lacking) < len(ranks):
        yield Problem(
            where=_ranks(lacking),
            found="no GPU that torch can use",
            expected="one, as on the other ranks",
            remedy="Check nvidia-smi, CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task, and "
            "`python -c 'import torch; print(torch.version.cuda)'`, which prints None for a build "
            "without CUDA.",
        )


def _without_code(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    everywhere = [rank.gpu.capability for rank in ranks if rank.gpu is not None]
    lacking = [r for r in ranks if r.gpu is not None and not runs_on(r.archs, r.gpu.capability)]
    for same in _grouped(lacking, lambda rank: (rank.gpu, rank.torch), of_gpu=True):
        gpu = same[0].gpu
        assert gpu is not None
        capability, archs = spell(gpu.capability), " ".join(same[0].archs)
        yield Problem(
            where=_ranks(same),
            found=f"torch {same[0].torch}, which has code for {archs or 'no GPU'}",
            expected=f"a build for {gpu.name}, compute capability {capability}",
            remedy=f"{install_advice(everywhere, same[0].torch)}.",
        )


def _without_bf16(
    ranks: Sequence[RankSoftware], dtypes: Sequence[ComputeDtype]
) -> Iterator[Problem]:
    lacking = [
        rank
        for rank, dtype in zip(ranks, dtypes, strict=False)
        if dtype == "bf16" and rank.gpu is not None and not _has_bf16(rank.gpu.capability)
    ]
    for same in _grouped(lacking, lambda rank: rank.gpu, of_gpu=True):
        gpu = same[0].gpu
        assert gpu is not None
        yield Problem(
            where=_ranks(same),
            found=f"bf16 on {gpu.name}, compute capability {spell(gpu.capability)}",
            expected=f"a GPU with units for it, from {spell(BF16_FROM)} on",
            remedy='Use --fp16, or "compute_dtype": "fp16" for this group, as zorse plan writes it '
            "with --dtype auto.",
        )


def _has_bf16(capability: Capability) -> bool:
    return capability >= BF16_FROM


def _shared(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    """NCCL refuses two ranks on one GPU, unless they are of different hosts as far as it knows."""
    with_gpu = [rank for rank in ranks if rank.gpu is not None]
    for same in _grouped(with_gpu, lambda rank: (rank.gpu and rank.gpu.uuid, rank.host_id)):
        gpu = same[0].gpu
        assert gpu is not None
        if len(same) > 1:
            yield Problem(
                where=_ranks(same),
                found=f"one GPU for all of them ({gpu.name}, {gpu.uuid})",
                expected="a GPU for each rank",
                remedy="Start as many ranks on a node as it has GPUs; under Slurm show each task "
                "its own (--gpus-per-task=1) or all tasks all of them.",
            )


def _different(
    ranks: Sequence[RankSoftware], what: str, value: Callable[[RankSoftware], str | None]
) -> Iterator[Problem]:
    with_gpu = [rank for rank in ranks if rank.gpu is not None]
    if len({value(rank) for rank in with_gpu}) < 2:
        return
    usual = value(with_gpu[0])
    for same in _grouped([r for r in with_gpu if value(r) != usual], value):
        yield Problem(
            where=_ranks(same),
            found=f"{what} {value(same[0]) or 'not installed'}",
            expected=f"{usual or 'none'}, as on rank {with_gpu[0].rank}",
            remedy=_SAME[what],
        )


_SAME = {
    "torch": "Install the same build on every node.",
    "NCCL": "Install the same torch build on every node: NCCL refuses another version of itself.",
    "--transformer-impl": "Install Transformer Engine on every node, or add "
    "--transformer-impl local to the command: a model's layers must be the same everywhere.",
}


def _impl(rank: RankSoftware) -> str:
    return rank.transformer_impl or "transformer_engine"


def _grouped(
    ranks: Sequence[RankSoftware],
    key: Callable[[RankSoftware], Hashable],
    *,
    of_gpu: bool = False,
) -> list[list[RankSoftware]]:
    """Ranks with the same key; `of_gpu`: whichever of several equal GPUs it is."""
    groups: dict[Hashable, list[RankSoftware]] = {}
    for rank in ranks:
        alike = rank
        if of_gpu and rank.gpu is not None:
            alike = replace(rank, gpu=replace(rank.gpu, uuid=""))
        groups.setdefault(key(alike), []).append(rank)
    return list(groups.values())


def _ranks(ranks: Sequence[RankSoftware]) -> str:
    listed = ", ".join(str(rank.rank) for rank in ranks[:_MAX_LISTED])
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    nodes = " and ".join(dict.fromkeys(rank.node for rank in ranks[:_MAX_LISTED]))
    return f"rank{'s'[: len(ranks) > 1]} {listed}{more} on {nodes}"
