"""Before Megatron is imported: is each rank on its GPU and node, and can it train there?

Ranks tell each other through the store in which they meet, because a GPU for which torch has no
code cannot take part in a collective call.
"""

import errno
import importlib
import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from zorse_megatron.adapter.cpu_mode import disable_dynamo
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.errors import PlanError
from zorse_megatron.flags.installed_software import (
    EXTENSIONS,
    RankSoftware,
    SeenGpu,
    found_lines,
    with_gpu_flags,
)
from zorse_megatron.flags.torch_builds import refuse_start
from zorse_megatron.gpus.gpu import TRITON_FROM, ComputeDtype, spell
from zorse_megatron.gpus.known_gpus import GPU_KIND, canonical_kind, kind_of_device
from zorse_megatron.inputs.rank_placement import RankLocation, placement_problems, unchecked_kinds
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered

_KEY = "zorse/software"


def checked_gpu_flags(
    flags: Sequence[str],
    *,
    node: str,
    store: dist.Store | None = None,
    dtypes: Sequence[ComputeDtype] = (),
) -> list[str]:
    """Check all ranks, and return Megatron's flags with those that this rank needs.

    On a rank without a GPU they come back as they are. `store`: where all ranks meet; None: only
    this rank is looked at. `dtypes`: rank -> what it computes in. Raises StartError on every rank
    with all that is wrong on any, also flags that need Transformer Engine where there is none.
    """
    mine = found_software(int(os.environ.get("RANK", "0")), _local_rank(), node)
    words = list(flags)
    command = None
    if (found := mine.gpu) is not None:
        command = with_gpu_flags(flags, mine)
        words = list(command.words)
        # The others have to know of refused flags, or they would wait for this rank.
        mine = replace(mine, transformer_impl=command.transformer_impl, refused=command.refused)
        _leave_dynamo_to_newer(found)
    ranks = [mine] if store is None else _exchanged(store, mine)
    refuse_start(ranks, () if store is None else dtypes, sees_all=store is not None)
    for line in found_lines(ranks):
        say(line)
    added = None if command is None else command.told
    if added is not None:
        say(added, on_each_node=True)
    return words


def _leave_dynamo_to_newer(gpu: SeenGpu) -> None:
    """torch.compile ends in an error below Triton's oldest GPU: Megatron's functions run as is."""
    if gpu.capability < TRITON_FROM and "TORCHDYNAMO_DISABLE" not in os.environ:
        disable_dynamo()
        say(
            f"{gpu.name} has compute capability {spell(gpu.capability)}, which torch.compile does "
            "not serve: TORCHDYNAMO_DISABLE=1",
            on_each_node=True,
        )


def refuse_unusable_gpu(*, rank: int, local_rank: int, node: str) -> None:
    """Raise StartError where torch has no code for this rank's GPU; for ranks that only measure."""
    refuse_start([found_software(rank, local_rank, node)], sees_all=False)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _exchanged(store: dist.Store, mine: RankSoftware) -> list[RankSoftware]:
    store.set(f"{_KEY}/{mine.rank}", mine.to_json())
    if mine.rank == 0:
        world = range(int(os.environ["WORLD_SIZE"]))
        texts = [store.get(f"{_KEY}/{rank}").decode() for rank in world]
        store.set(_KEY, "\n".join(texts))
    return [RankSoftware.from_json(line) for line in store.get(_KEY).decode().splitlines()]


# Asks torch and the installation what a rank's `RankSoftware` is; imports neither Megatron nor
# Transformer Engine, which take seconds and may fail where they do not fit the GPU.


def gpu_of(local_rank: int) -> int:
    """Number of the GPU that a rank takes, among those that its process sees.

    A launcher may show each task its own GPU alone: then it is number 0, whatever the local rank.
    """
    return local_rank % torch.cuda.device_count()


def take_gpu() -> None:
    """Let this process compute on the GPU of its rank, if there is one."""
    if torch.cuda.device_count():
        torch.cuda.set_device(gpu_of(_local_rank()))


def found_software(rank: int, local_rank: int, node: str) -> RankSoftware:
    """Look at this process's GPU and at what is installed."""
    gpu = _gpu(gpu_of(local_rank)) if torch.cuda.device_count() else None
    compiles = gpu is not None and gpu.capability >= TRITON_FROM and not _is_dynamo_off()
    return RankSoftware(
        rank=rank,
        node=node,
        gpu=gpu,
        torch=torch.__version__,
        archs=tuple(torch.cuda.get_arch_list()) if gpu else (),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        transformer_engine=_version("transformer-engine", "transformer_engine"),
        flash_attention=_version("flash-attn", "flash_attn"),
        extensions=tuple(name for name in EXTENSIONS if _is_there(name)),
        unusable_gpus=_unusable_gpus() if gpu is None else None,
        missing_to_compile=tuple(_missing_to_compile()) if compiles else (),
        host_id=os.environ.get("NCCL_HOSTID"),
    )


def _gpu(number: int) -> SeenGpu:
    properties = torch.cuda.get_device_properties(number)
    return SeenGpu(
        name=properties.name,
        uuid=f"GPU-{properties.uuid}",
        capability=(properties.major, properties.minor),
    )


_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")
_HIDDEN = ("", "-1", "NoDevFiles")
"""What CUDA_VISIBLE_DEVICES is where a user, or Slurm, wants no GPU."""


def _unusable_gpus() -> str | None:
    """NVIDIA's GPUs that this process should see, if torch sees none; and why it does not."""
    numbered = [each for each in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in _HIDDEN or not (devices := [each for each in numbered if not _is_withheld(each)]):
        return None
    if torch.version.cuda is None:
        reason = "a build of torch without CUDA"
    else:
        try:
            torch.cuda.init()
            reason = "torch sees none"
            if visible is not None:
                reason += f" with CUDA_VISIBLE_DEVICES={visible}"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
    text = _DRIVER.read_text(errors="replace") if _DRIVER.exists() else ""
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    driver = f"driver {version[1]}" if version else "a driver that tells no version"
    return f"{len(devices)} NVIDIA GPU(s) with {driver} ({reason})"


def _is_withheld(device: Path) -> bool:
    """Whether a cgroup keeps this process from it: Slurm, or a container, has given it to others.

    Files that only belong to another user or group answer EACCES.
    """
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def _is_dynamo_off() -> bool:
    return os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _missing_to_compile() -> Iterator[str]:
    """As Triton looks for them (`triton.runtime.build`)."""
    chosen = os.environ.get("CC")
    if not any(map(shutil.which, ("gcc", "clang") if chosen is None else (chosen,))):
        yield "C compiler" if chosen is None else f"C compiler {chosen!r}, which CC names"
    scheme = sysconfig.get_default_scheme()  # Debian's own is where packages go, not headers
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if not header.exists():
        yield f"Python headers ({header})"


def _version(distribution: str, module: str) -> str | None:
    """The installed version; None where the module cannot be found."""
    if not _is_there(module):
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # its parent does not load, for whatever reason
        return False


# Stops a job at its start where a rank is not on the GPU, or not on the node, of the plan.


def check_placement(run: PlanRun) -> None:
    """Compare where all ranks are with the plan and the cluster file; a collective call.

    Raises PlanError on every rank, with all that are elsewhere.
    """
    mine = _found(run.node)
    found = gathered(mine)
    kinds = run.plan.cluster.gpu_kinds if run.plan.cluster else None
    nodes = None
    if run.cluster is not None:
        kinds = kinds or run.cluster.gpu_kinds
        nodes = [node.name for node in run.cluster.nodes for _ in node.ranks]
    problems = placement_problems(found, kinds=kinds, nodes=nodes)
    if problems:
        raise PlanError("The ranks are not on the GPUs of the plan", problems)
    unchecked = unchecked_kinds(kinds or ()) if mine.gpu_kind and not mine.is_declared else []
    if unchecked:
        say(f"not well known, so not compared with the GPUs of the ranks: {', '.join(unchecked)}")


def _found(node: str) -> RankLocation:
    declared = os.environ.get(GPU_KIND)
    if declared:
        return RankLocation(node=node, gpu_kind=canonical_kind(declared), is_declared=True)
    if not torch.cuda.is_available():  # as in CPU mode
        return RankLocation(node=node, gpu_kind=None)
    gpu = torch.cuda.get_device_properties()
    return RankLocation(node=node, gpu_kind=kind_of_device(gpu.name, gpu.total_memory))
