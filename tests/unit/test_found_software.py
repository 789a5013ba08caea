"""What a rank finds out about its GPU, asked of a torch that pretends to have some."""

from types import SimpleNamespace

import pytest
import torch

from zorse_megatron.adapter import start_checks as module
from zorse_megatron.adapter.start_checks import found_software, gpu_of, take_gpu


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs this process sees; number n is of compute capability 7.n."""

    def set_count(count):
        def properties(number):
            assert number < count
            return SimpleNamespace(name=f"GPU {number}", uuid=f"{number}", major=7, minor=number)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70"])
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))

    return set_count


@pytest.mark.parametrize(
    ("visible", "local_rank", "number"),
    [
        (8, 3, 3),
        # Slurm's --gpus-per-task=1, and two GPUs for four ranks that share them.
        (1, 3, 0),
        (2, 3, 1),
    ],
)
def test_the_gpu_of_a_rank(visible, local_rank, number, gpus, monkeypatch):
    gpus(visible)
    assert gpu_of(local_rank) == number
    found = found_software(5, local_rank, "node1")
    assert found.gpu is not None
    assert (found.rank, found.gpu.name, found.gpu.capability) == (5, f"GPU {number}", (7, number))
    assert (found.archs, found.nccl, found.host_id) == (("sm_70",), "2.29.7", None)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    take_gpu()
    assert taken == [number]


def test_a_rank_without_a_gpu(gpus):
    gpus(0)
    found = found_software(0, 0, "here")
    assert (found.gpu, found.archs, found.nccl) == (None, (), None)
    assert found.torch == torch.__version__
    take_gpu()


def test_packages_that_are_broken_are_not_there(monkeypatch):
    def find_spec(name):
        if name == "apex.optimizers":
            raise AttributeError("PyPI's apex is another project")
        return object() if name in ("transformer_engine", "apex.normalization") else None

    monkeypatch.setattr(module.importlib.util, "find_spec", find_spec)
    found = found_software(0, 0, "here")
    assert found.transformer_engine == "of an unknown version"
    assert found.flash_attention is None
    assert found.extensions == ("apex.normalization",)
