"""What a rank finds out about its GPU, asked of a torch that pretends to have some."""

import errno
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from zorse_megatron.adapter import start_checks as module
from zorse_megatron.adapter.start_checks import found_software, gpu_of, take_gpu
from zorse_megatron.flags.installed_software import SeenGpu
from zorse_megatron.flags.torch_builds import start_problems


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


@pytest.fixture
def machine(gpus, monkeypatch, tmp_path):
    """A machine with two NVIDIA GPUs and a driver, of which torch sees none."""
    gpus(0)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvme0"):
        (tmp_path / name).touch()
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\n")
    monkeypatch.setattr(module, "_DEVICES", tmp_path)
    monkeypatch.setattr(module, "_DRIVER", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(machine, monkeypatch):
    found = found_software(0, 0, "here")
    said = "2 NVIDIA GPU(s) with driver 470.82.01 (The NVIDIA driver on your system is too old)"
    assert found.unusable_gpus == said
    (problem,) = start_problems([found, found_software(1, 1, "here")])
    assert problem.where == "ranks 0, 1 on here"
    assert problem.found == f"{said}, with torch {torch.__version__}"
    monkeypatch.setattr(torch.version, "cuda", None)
    found = found_software(0, 0, "here")
    assert found.unusable_gpus is not None and "without CUDA" in found.unusable_gpus


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles", None])
def test_gpus_that_are_hidden_or_not_there_are_left_alone(hidden, machine, monkeypatch):
    if hidden is None:
        for number in range(2):
            (machine / f"nvidia{number}").unlink()
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = found_software(0, 0, "here")
    assert found.unusable_gpus is None and start_problems([found]) == []


@pytest.mark.parametrize(("number", "is_withheld"), [(errno.EPERM, True), (errno.EACCES, False)])
def test_gpus_that_a_cgroup_withholds_are_not_this_process_s(
    number, is_withheld, machine, monkeypatch
):
    """As Slurm does (ConstrainDevices) for a job without GPUs, on a node with some."""
    opened = os.open

    def refusing(path, *args, **kwargs):
        if str(path).startswith(str(machine)):
            raise OSError(number, os.strerror(number))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(module.os, "open", refusing)
    assert (found_software(0, 0, "here").unusable_gpus is None) == is_withheld


def test_gpus_that_are_not_there_are_told_with_what_hides_them(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = found_software(0, 0, "here").unusable_gpus
    assert found is not None and "torch sees none with CUDA_VISIBLE_DEVICES=7" in found


def test_what_torch_compile_needs_is_looked_for_before_it_is_needed(gpus, monkeypatch, tmp_path):
    gpus(1)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    there = {"cc", "/opt/cc"}
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(module.sysconfig, "get_default_scheme", lambda: "posix_local")
    paths = {"posix_prefix": {"include": str(tmp_path)}}
    monkeypatch.setattr(module.sysconfig, "get_paths", paths.get)
    found = found_software(0, 0, "here")
    header = f"Python headers ({tmp_path}/Python.h)"
    assert found.missing_to_compile == ("C compiler", header)
    (problem,) = start_problems([found])
    assert problem.found == f"no C compiler and no {header}"
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", "/opt/cc -pipe")
    (missing,) = found_software(0, 0, "here").missing_to_compile
    assert missing == "C compiler '/opt/cc -pipe', which CC names"
    monkeypatch.setenv("CC", "/opt/cc")
    assert found_software(0, 0, "here").missing_to_compile == ()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert found_software(0, 0, "here").missing_to_compile == ()


@pytest.mark.parametrize(
    ("minor", "chosen", "is_off"),
    [((6, 0), None, "1"), ((7, 0), None, None), ((6, 0), "0", "0")],
)
def test_torch_compile_is_off_below_what_it_serves(minor, chosen, is_off, monkeypatch, capsys):
    gpu = SeenGpu(name="a GPU", uuid="1", capability=minor)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", chosen)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", SimpleNamespace(disable=False))
    module._leave_dynamo_to_newer(gpu)
    try:
        assert os.environ.get("TORCHDYNAMO_DISABLE") == is_off
        assert sys.modules["torch._dynamo.config"].disable == (is_off == "1")
        assert ("compute capability 6.0" in capsys.readouterr().out) == (is_off == "1")
    finally:
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
