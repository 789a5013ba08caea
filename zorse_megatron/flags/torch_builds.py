"""Published builds of torch, which GPUs they run on, and what keeps ranks from training.

A build's list is what `torch.cuda.get_arch_list()` returns: `sm_XY` is machine code, `compute_XY`
is PTX, which the driver compiles for newer GPUs. The rules are those of the CUDA C++ Programming
Guide ("Binary Compatibility", "PTX Compatibility", "Family-Specific Features").
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.flags.installed_software import RankSoftware
from zorse_megatron.gpus.gpu import BF16_FROM, Capability, ComputeDtype, spell
from zorse_megatron.gpus.known_gpus import CAPABILITIES

_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_INDEX = "https://download.pytorch.org/whl"
_OLDER = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_NEWER = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """One build of a torch release, for Linux on x86-64."""

    torch: str
    """Release, such as "2.13"."""
    cuda: str
    """Version of CUDA, such as "12.6"."""
    archs: tuple[str, ...] = _NEWER
    """Without the PTX that some of them are said to have: it is not relied upon."""

    @property
    def is_default(self) -> bool:
        """Whether this is what `pip install torch` brings."""
        return self.cuda == "13.0"

    @property
    def name(self) -> str:
        """As its wheels are tagged: "2.13+cu126"."""
        return f"{self.torch}+{self._tag}"

    @property
    def pip(self) -> str:
        """The command that installs it."""
        return f"pip install 'torch=={self.torch}.*' --index-url {_INDEX}/{self._tag}"

    @property
    def _tag(self) -> str:
        return f"cu{self.cuda.replace('.', '')}"


# Sources: RELEASE.md of PyTorch, "PyTorch CUDA Support Matrix", for 2.11 (pytorch/pytorch#175253;
# 12.8 lost Volta there) and 2.12 (#182849); for 2.13 torch.cuda.get_arch_list() of 2.13.0+cu130,
# and pytorch/pytorch#190355: ships 12.6 for older architectures, as 2.14 will.
BUILDS = (
    TorchBuild(torch="2.13", cuda="13.0"),
    TorchBuild(torch="2.13", cuda="12.6", archs=_OLDER),
    TorchBuild(torch="2.12", cuda="13.0"),
    TorchBuild(torch="2.12", cuda="12.6", archs=_OLDER),
    TorchBuild(torch="2.11", cuda="13.0"),
    TorchBuild(torch="2.11", cuda="12.8"),
    TorchBuild(torch="2.11", cuda="12.6", archs=_OLDER),
)
"""Of the releases that this package runs on, newest first and of each release the default first."""
RELEASES = tuple(dict.fromkeys(build.torch for build in BUILDS))
"""The releases, newest first; pyproject.toml asks for one of them."""


def runs_on(archs: Collection[str], capability: Capability) -> bool:
    """Whether a build with these architectures has code that a GPU can execute.

    >>> runs_on(["sm_80"], (8, 6)), runs_on(["sm_86"], (8, 0)), runs_on(["compute_80"], (9, 0))
    (True, False, True)
    """
    return any(_serves(arch, capability) for arch in archs)


def _serves(arch: str, capability: Capability) -> bool:
    match = _ARCH.fullmatch(arch)
    if match is None:
        return False
    what, suffix = match[1], match[4]
    target = (int(match[2]), int(match[3]))
    if suffix == "a":  # for this very GPU
        return target == capability
    if what == "compute" and not suffix:
        return target <= capability
    return target[0] == capability[0] and target <= capability


def builds_for(capabilities: Collection[Capability], torch: str = "") -> list[TorchBuild]:
    """Return the builds that run on all these GPUs; those of the release `torch` come first."""
    fitting = [b for b in BUILDS if all(runs_on(b.archs, each) for each in capabilities)]
    release = ".".join(torch.split(".")[:2])
    return sorted(fitting, key=lambda build: build.torch != release)


def install_advice(capabilities: Collection[Capability], torch: str = "") -> str:
    """Say which one build to install on all nodes of a job with these GPUs."""
    fitting = builds_for(capabilities, torch)
    if fitting:
        return f"Install on every node the build for CUDA {fitting[0].cuda}: {fitting[0].pip}"
    listed = " and ".join(spell(each) for each in sorted(set(capabilities)))
    archs = ";".join(spell(each) for each in sorted(set(capabilities)))
    return (
        f"No published build has code for all of {listed}: leave one kind of GPU out, or build "
        f'torch with TORCH_CUDA_ARCH_LIST="{archs}"'
    )


def build_notes(kinds: Sequence[str]) -> list[str]:
    """What to know of a cluster's kinds of GPU before torch is installed; nothing if any will do.

    Kinds whose compute capability is not known are passed over.
    """
    capabilities = _capabilities(kinds)
    lacking = _lacking(capabilities)
    if not lacking:
        return []
    listed = " and ".join(sorted({spell(capabilities[kind]) for kind in lacking}))
    return [
        f"{' and '.join(lacking)}: the torch that pip installs by default ({BUILDS[0].name}) has "
        f"no code for compute capability {listed}. {install_advice(list(capabilities.values()))}"
    ]


def short_build_note(kinds: Sequence[str]) -> str:
    """Return the one line that says what to install first; empty if any build will do."""
    capabilities = _capabilities(kinds)
    lacking = _lacking(capabilities)
    if not lacking:
        return ""
    fitting = builds_for(list(capabilities.values()))
    if not fitting:
        return f"No published build of torch runs on all of {', '.join(capabilities)}"
    return f"{', '.join(lacking)} need: {fitting[0].pip}"


def _capabilities(kinds: Sequence[str]) -> dict[str, Capability]:
    return {kind: CAPABILITIES[kind] for kind in kinds if kind in CAPABILITIES}


def _lacking(capabilities: dict[str, Capability]) -> list[str]:
    """Kinds that the default build has no code for."""
    return [kind for kind, each in capabilities.items() if not runs_on(BUILDS[0].archs, each)]


# What keeps ranks from training, as far as their GPUs and what is installed there tell.


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
        *_unusable(ranks),
        *_without_gpu(ranks),
        *_without_compiler(ranks),
        *_without_code(ranks),
        *_without_bf16(ranks, dtypes),
        *_shared(ranks),
        *_different(ranks, "torch", lambda rank: rank.torch),
        *_different(ranks, "NCCL", lambda rank: rank.nccl),
        *_different(
            ranks,
            "--transformer-impl",
            lambda rank: rank.transformer_impl or "transformer_engine",
        ),
    ]


def _refused(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    """Flags; where they work on other ranks, with the ranks on which they do not."""
    refusing = [rank for rank in ranks if rank.refused]
    for same in _grouped(refusing, lambda rank: rank.refused):
        on_some = f" ({_ranks(same)})" if len(same) < len(ranks) else ""
        for problem in same[0].refused:
            yield replace(problem, where=f"{problem.where}{on_some}")


def _unusable(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    """GPUs that are there: to train on the CPU beside them must be asked for."""
    having = [rank for rank in ranks if rank.gpu is None and rank.unusable_gpus]
    for same in _grouped(having, lambda rank: (rank.unusable_gpus, rank.torch)):
        yield unusable_gpus(_ranks(same), str(same[0].unusable_gpus), same[0].torch)


def unusable_gpus(where: str, found: str, torch: str) -> Problem:
    """What is wrong with GPUs that this torch cannot use."""
    return Problem(
        where=where,
        found=f"{found}, with torch {torch}",
        expected="GPUs that torch can use",
        remedy="Builds for CUDA 13.0 need driver 580 or newer, those for 12.6 and 12.8 need "
        "525: update the driver, or install another build on every node (docs/gpus.md lists "
        "them by GPU). To train on the CPU, hide the GPUs: CUDA_VISIBLE_DEVICES= (empty).",
    )


def _without_compiler(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    lacking = [rank for rank in ranks if rank.gpu is not None and rank.missing_to_compile]
    for same in _grouped(lacking, lambda rank: rank.missing_to_compile):
        yield Problem(
            where=_ranks(same),
            found=f"no {' and no '.join(same[0].missing_to_compile)}",
            expected="both a C compiler and Python's headers, which torch.compile needs",
            remedy="Install them (Debian: gcc and python3-dev), or set TORCHDYNAMO_DISABLE=1, with "
            "which Megatron's fused functions are not compiled.",
        )


def _without_gpu(ranks: Sequence[RankSoftware]) -> Iterator[Problem]:
    lacking = [rank for rank in ranks if rank.gpu is None and not rank.unusable_gpus]
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
        if dtype == "bf16" and rank.gpu is not None and rank.gpu.capability < BF16_FROM
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
