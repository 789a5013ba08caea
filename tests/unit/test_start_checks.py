"""Which GPUs a torch build runs on, what it takes to train there, and what is said of it."""

import dataclasses
import json

import pytest

from zorse_megatron.flags.installed_software import (
    EXTENSIONS,
    RankSoftware,
    SeenGpu,
    found_lines,
    with_gpu_flags,
)
from zorse_megatron.flags.torch_builds import (
    BUILDS,
    StartError,
    build_notes,
    builds_for,
    install_advice,
    refuse_start,
    runs_on,
    start_problems,
)
from zorse_megatron.gpus.gpu import BF16_FROM
from zorse_megatron.gpus.known_gpus import CAPABILITIES, GPU_KINDS

# `torch.cuda.get_arch_list()` as others have printed it. 2.13.0+cu130: the wheel of PyPI;
# 2.5.1 and 2.6.0: moi90/pytorch_compute_capabilities, table.md; 2.8+cu128: PyTorch's
# .ci/manywheel/build_cuda.sh; 11.8: with the PTX that old builds had.
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU118 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_37", "sm_90", "compute_37")
OF_251 = ("sm_50", "sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_90a")
WITH_PTX = (*CU130, "compute_120")
V100, T4, A100, A6000, L4 = (7, 0), (7, 5), (8, 0), (8, 6), (8, 9)
H100, B200, B300, RTX5090, THOR = (9, 0), (10, 0), (10, 3), (12, 0), (11, 0)


@pytest.mark.parametrize(
    ("archs", "served", "not_served"),
    [
        (CU130, [T4, A100, A6000, L4, H100, B200, B300, RTX5090], [V100, (6, 0), THOR]),
        (CU126, [V100, T4, A100, A6000, L4, H100, (6, 1)], [B200, RTX5090]),
        (WITH_PTX, [T4, RTX5090, (12, 1), (13, 0)], [V100, THOR]),
        # PTX serves all that is newer, machine code its own generation from its own number on.
        (CU118, [V100, B200, RTX5090], [(3, 5)]),
        (OF_251, [V100, H100], [B200]),
        # An `a` is for one GPU, an `f` for a family; code for 8.6 is not for 8.0.
        (("sm_90a",), [H100], [A100, B200]),
        (("sm_100a", "compute_100a"), [B200], [B300, RTX5090]),
        (("sm_100f", "compute_100f"), [B200, B300], [H100, RTX5090]),
        (("sm_86",), [A6000, L4], [A100, H100]),
        ((), [], [V100, H100]),
        (("gfx90a",), [], [H100]),
    ],
)
def test_runs_on(archs, served, not_served):
    assert [each for each in served if not runs_on(archs, each)] == []
    assert [each for each in not_served if runs_on(archs, each)] == []


def test_every_kind_of_nvidia_has_a_capability_and_units_as_its_figures_say():
    assert set(CAPABILITIES) == set(GPU_KINDS) - {"W6800"}
    for kind, capability in CAPABILITIES.items():
        assert GPU_KINDS[kind].computes_in("bf16") == (capability >= BF16_FROM), kind


def test_the_builds_are_as_their_releases_say():
    assert {build.torch: build.name for build in BUILDS if build.is_default} == {
        "2.13": "2.13+cu130",
        "2.12": "2.12+cu130",
        "2.11": "2.11+cu130",
    }
    for build in BUILDS:
        assert runs_on(build.archs, V100) == (build.cuda == "12.6")
        assert all(runs_on(build.archs, each) for each in (T4, A100, A6000, L4, H100))


def test_one_build_for_all_nodes_of_the_release_that_is_there():
    assert [build.name for build in builds_for([V100, A6000], "2.12.1+cu130")] == [
        "2.12+cu126",
        "2.13+cu126",
        "2.11+cu126",
    ]
    advice = install_advice([V100, A6000], "2.13.0+cu130")
    assert (
        "pip install 'torch==2.13.*' --index-url https://download.pytorch.org/whl/cu126" in advice
    )
    assert 'TORCH_CUDA_ARCH_LIST="7.0;10.0"' in install_advice([B200, V100, V100])


def test_a_cluster_is_told_what_to_install():
    (note,) = build_notes(["A6000", "V100-16", "Z1"])
    assert note.startswith("V100-16: ") and "7.0" in note and "cu126" in note
    assert build_notes(["A100-40", "T4", "H100-80", "B200", "W6800"]) == []


def rank(number, capability=A100, **changes):
    return dataclasses.replace(
        RankSoftware(
            rank=number,
            node=f"node{number // 2}",
            gpu=SeenGpu(name=f"GPU of {capability}", uuid=f"GPU-{number}", capability=capability),
            torch="2.13.0+cu130",
            archs=CU130,
            nccl="2.29.7",
            transformer_engine="2.9.0",
            flash_attention=None,
            extensions=EXTENSIONS,
        ),
        **changes,
    )


def test_ranks_that_can_train():
    assert start_problems([rank(0), rank(1, T4), rank(2, H100)], ["bf16", "fp16", "bf16"]) == []
    assert start_problems([rank(0, gpu=None), rank(1, gpu=None, torch="another")]) == []


def test_a_gpu_that_torch_has_no_code_for():
    """The README's cluster: four A6000 and four V100, with the torch that pip installs."""
    ranks = [rank(n, A6000) for n in range(4)] + [rank(n, V100) for n in range(4, 8)]
    (problem,) = start_problems(ranks)
    assert problem.where == "ranks 4, 5, 6, 7 on node2 and node3"
    assert problem.found == f"torch 2.13.0+cu130, which has code for {' '.join(CU130)}"
    assert problem.expected == f"a build for GPU of {V100}, compute capability 7.0"
    assert problem.remedy == (
        "Install on every node the build for CUDA 12.6: pip install 'torch==2.13.*' --index-url "
        "https://download.pytorch.org/whl/cu126."
    )
    with_older = [dataclasses.replace(each, archs=CU126) for each in ranks]
    assert start_problems(with_older) == []


def test_all_problems_at_once():
    ranks = [
        rank(0),
        rank(1, V100, torch="2.13.0+cu126", archs=CU126, nccl="2.27.5"),
        rank(2, gpu=None),
        rank(3, transformer_engine=None, transformer_impl="local"),
        rank(4, H100, gpu=SeenGpu(name="H", uuid="GPU-0", capability=H100)),
        rank(5, B200, archs=CU126),
    ]
    found = {(p.where, p.found) for p in start_problems(ranks, ["bf16"] * 6)}
    assert found == {
        ("rank 2 on node1", "no GPU that torch can use"),
        ("rank 5 on node2", f"torch 2.13.0+cu130, which has code for {' '.join(CU126)}"),
        ("rank 1 on node0", f"bf16 on GPU of {V100}, compute capability 7.0"),
        ("ranks 0, 4 on node0 and node2", f"one GPU for all of them (GPU of {A100}, GPU-0)"),
        ("rank 1 on node0", "torch 2.13.0+cu126"),
        ("rank 1 on node0", "NCCL 2.27.5"),
        ("rank 3 on node1", "--transformer-impl local"),
    }


def test_ranks_may_share_a_gpu_that_nccl_takes_for_several_hosts():
    shared = SeenGpu(name="A", uuid="GPU-0", capability=A100)
    ranks = [rank(n, gpu=shared, host_id=f"host{n}") for n in range(3)]
    assert start_problems(ranks) == []
    (problem,) = start_problems([*ranks, rank(3, gpu=shared, host_id="host0")])
    assert problem.where == "ranks 0, 3 on node0 and node1"


@pytest.mark.parametrize("sees_all", [True, False])
def test_who_says_it(sees_all):
    with pytest.raises(StartError) as raised:
        refuse_start([rank(0, V100)], sees_all=sees_all)
    assert raised.value.is_of_one_rank == (not sees_all)
    refuse_start([rank(0)], sees_all=sees_all)


def test_ranks_tell_each_other_everything():
    for each in (rank(3, H100, host_id="x", transformer_impl="local"), rank(0, gpu=None)):
        text = each.to_json()
        assert "\n" not in text and json.loads(text)
        assert RankSoftware.from_json(text) == each


def without(*extensions, engine=None):
    there = tuple(name for name in EXTENSIONS if name not in extensions)
    return rank(0, transformer_engine=engine, extensions=there)


def test_flags_for_a_gpu_with_nothing_but_torch():
    command = with_gpu_flags(["--bf16"], without(*EXTENSIONS))
    added = command.words[1:]
    assert added == (
        *("--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm"),
        *("--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion"),
    )
    assert command.transformer_impl == "local"
    line = command.told
    assert line is not None
    assert "--transformer-impl local --no-rope-fusion (Transformer Engine is not installed)" in line
    assert all(word in line for word in added)
    again = with_gpu_flags(command.words, without(*EXTENSIONS))
    assert (again.words, again.added, again.told) == (command.words, (), None)
    assert again.transformer_impl == "local"


@pytest.mark.parametrize(
    ("argv", "found", "added"),
    [
        ([], without(engine="2.9"), ()),
        ([], without(*EXTENSIONS, engine="2.9"), ("--no-gradient-accumulation-fusion",)),
        (
            ["--transformer-impl", "local"],
            without("apex.normalization", engine="2.9"),
            ("--no-persist-layer-norm",),
        ),
        ([], without(), ("--transformer-impl", "local", "--no-rope-fusion")),
        (["--no-rope-fusion", "--transformer-impl=local"], without(), ()),
    ],
)
def test_only_what_is_missing_is_made_up_for(argv, found, added):
    assert with_gpu_flags(argv, found).words == (*argv, *added)


def test_flags_that_need_transformer_engine_are_named_together():
    argv = ["--transformer-impl", "transformer_engine", "--attention-backend", "flash"]
    assert [problem.where for problem in with_gpu_flags(argv, without()).refused] == argv[::2]
    there = with_gpu_flags(argv, without(engine="2.9"))
    assert (there.added, there.refused) == ((), ())


def test_flags_that_some_ranks_refuse_are_said_by_all_with_those_ranks():
    argv = ["--attention-backend", "flash"]
    refused = with_gpu_flags(argv, without()).refused
    ranks = [rank(0), rank(1, T4, refused=refused), rank(2, T4, refused=refused)]
    (problem,) = start_problems(ranks)
    assert problem.where == "--attention-backend (ranks 1, 2 on node0 and node1)"
    (problem,) = start_problems(ranks[1:])
    assert problem == refused[0]
    assert RankSoftware.from_json(ranks[1].to_json()) == ranks[1]


def test_one_line_each_on_what_was_found():
    ranks = [rank(0, A100), rank(1, A100), rank(2, T4)]
    assert found_lines(ranks) == [
        f"GPUs: 2 x GPU of {A100} (compute capability 8.0), 1 x GPU of {T4} (compute capability "
        "7.5); torch 2.13.0+cu130 has code for all of them",
        "bf16: on all GPUs but those of compute capability 7.5",
        "attention: Transformer Engine's choice; cuDNN's fused one: on all GPUs but those of "
        "compute capability 7.5",
        "Transformer Engine: 2.9.0",
        "Apex: installed",
        "Adam: Transformer Engine's FusedAdam",
    ]
    assert found_lines([rank(0, gpu=None)]) == []
    bare = found_lines([dataclasses.replace(without(*EXTENSIONS), transformer_impl="local")])
    assert bare[2:] == [
        "attention: unfused, the only one of --transformer-impl local: scores take memory",
        "Transformer Engine: not installed",
        "Apex: not installed",
        "Adam: torch's AdamW (neither Transformer Engine nor Apex is installed)",
    ]
    with_apex = found_lines([without()])
    assert with_apex[-1] == "Adam: Apex's FusedAdam"
