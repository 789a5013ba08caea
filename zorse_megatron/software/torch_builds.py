"""Published builds of torch, and which GPUs they have machine code for.

A build's list is what `torch.cuda.get_arch_list()` returns: `sm_XY` is machine code, `compute_XY`
is PTX, which the driver compiles for newer GPUs. The rules are those of the CUDA C++ Programming
Guide ("Binary Compatibility", "PTX Compatibility", "Family-Specific Features").
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from zorse_megatron.schema.gpus.compute_capability import Capability, spell
from zorse_megatron.schema.gpus.gpu_presets import CAPABILITIES

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
    archs: tuple[str, ...]
    """Without the PTX that some of them are said to have: it is not relied upon."""
    source: str
    is_default: bool = False
    """Whether this is what `pip install torch` brings."""

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


def _matrix(release: str, pull_request: int) -> str:
    """Source: PyTorch's own table for a release."""
    return (
        f'RELEASE.md of PyTorch, "PyTorch CUDA Support Matrix", for release {release} '
        f"(pytorch/pytorch#{pull_request})"
    )


def _release(
    torch: str, *others: TorchBuild, source: str, source_of_older: str = ""
) -> tuple[TorchBuild, ...]:
    """The build for CUDA 13.0, which is the default, and the one for 12.6, for older GPUs too."""
    older = TorchBuild(torch=torch, cuda="12.6", archs=_OLDER, source=source_of_older or source)
    newer = TorchBuild(torch=torch, cuda="13.0", archs=_NEWER, source=source, is_default=True)
    return newer, *others, older


_WITHOUT_VOLTA = TorchBuild(
    torch="2.11",
    cuda="12.8",
    archs=_NEWER,
    source=f"{_matrix('2.11', 175253)}; Volta was dropped from it there",
)
BUILDS = (
    *_release(
        "2.13",
        source="torch.cuda.get_arch_list() of 2.13.0+cu130",
        source_of_older="pytorch/pytorch#190355: ships 12.6 for older architectures, as 2.14 will",
    ),
    *_release("2.12", source=_matrix("2.12", 182849)),
    *_release("2.11", _WITHOUT_VOLTA, source=_matrix("2.11", 175253)),
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
    return list(_notes({kind: CAPABILITIES[kind] for kind in kinds if kind in CAPABILITIES}))


def short_build_note(kinds: Sequence[str]) -> str:
    """Return the one line that says what to install first; empty if any build will do."""
    capabilities = {kind: CAPABILITIES[kind] for kind in kinds if kind in CAPABILITIES}
    lacking = _lacking(capabilities)
    if not lacking:
        return ""
    fitting = builds_for(list(capabilities.values()))
    if not fitting:
        return f"No published build of torch runs on all of {', '.join(capabilities)}"
    return f"{', '.join(lacking)} need: {fitting[0].pip}"


def _lacking(capabilities: dict[str, Capability]) -> list[str]:
    """Kinds that the default build has no code for."""
    default = next(build for build in BUILDS if build.is_default)
    return [kind for kind, each in capabilities.items() if not runs_on(default.archs, each)]


def _notes(capabilities: dict[str, Capability]) -> Iterator[str]:
    default = next(build for build in BUILDS if build.is_default)
    lacking = _lacking(capabilities)
    if lacking:
        yield (
            f"{' and '.join(lacking)}: the torch that pip installs by default "
            f"({default.name}) has no code for compute capability "
            f"{' and '.join(sorted({spell(capabilities[kind]) for kind in lacking}))}. "
            f"{install_advice(list(capabilities.values()))}"
        )
