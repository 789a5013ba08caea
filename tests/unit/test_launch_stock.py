"""`zorse launch --stock`: unmodified Megatron, with ranks and flags as the layout has them."""

import dataclasses
import json
import re
import shlex
import subprocess

import pytest
from hypothesis import given

from tests.unit.cli_samples import FLAGS
from tests.unit.test_launch import tasks_of
from tests.unit.test_stock_plans import inputs_for, layouts
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.launch.batch_script import BatchOptions, batch_script, components_of
from zorse_megatron.launch.training_command import in_order, stock_training_of, torchrun_lines
from zorse_megatron.plan.plan import ClusterFingerprint, ModelFingerprint
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.baselines.stock_layouts import Grid, plan_of_grid

# The second and third GPU of a node with four; a layout that begins on the other nodes.
CLUSTER = """\
nodes:
  - {name: big, gpus: [1 x A100-40, 1 x T4], gpu_numbers: [1, 2], nics: 10 Gb/s}
  - {name: small, count: 2, gpus: 2 x L4, nics: 10 Gb/s}
"""
KINDS = ("A100-40", "T4", "L4", "L4", "L4", "L4")
ORDER = (2, 3, 4, 5, 1, 0)
GRID = Grid(layers=(1, 2, 5), width=1, micro_batch_size=2, mode="full", recomputed=1, tensor=2)
# As the six GPUs have them: tensor-parallel groups of two on each node.
SETS_ORDER = (2, 3, 4, 5, 0, 1)
LAYOUT = (
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "3"),
    *("--micro-batch-size", "2", "--use-distributed-optimizer", "--overlap-param-gather"),
    *("--overlap-grad-reduce", "--pipeline-model-parallel-layout", "Et|tt|t*5L"),
    *("--recompute-granularity", "full", "--recompute-method", "block"),
    *("--recompute-num-layers", "1"),
)
COMMAND = ("pretrain_gpt.py", *FLAGS, "--attention-dropout", "0", "--hidden-dropout", "0")
SAVED = ("--save", "d", "--save-interval", "9")
FILES = ("plan.json", "--cluster", "cluster.yaml", "--stock")


def write_plan(directory, grid=GRID, order=SETS_ORDER, **fields):
    inputs = inputs_for(grid, 16 // (grid.width * grid.micro_batch_size))
    inputs.cluster = ClusterFingerprint(gpu_kinds=KINDS)
    inputs.model = ModelFingerprint(num_layers=8, hidden_size=1024, seq_length=512)
    plan = dataclasses.replace(plan_of_grid(inputs, grid, order), **fields)
    save_plan(plan, directory / "plan.json")


@pytest.fixture
def run(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    write_plan(tmp_path)
    return run


def commands(text):
    return [shlex.split(line) for line in text.splitlines() if line and line[0] != "#"]


def test_lines_start_the_users_script_with_the_layout(run):
    result = run("launch", *FILES, "--torchrun", "--", *COMMAND, *SAVED)
    assert result.exit_code == 0, result.output
    assert "zorse" not in result.stdout
    small, same, big = commands(result.stdout)
    resumes = (*SAVED, *LAYOUT, "--load", "d", "--exit-signal-handler")
    for number, words in enumerate((small, same, big)):
        start = words.index("torchrun")
        assert words[start + 1 : start + 11] == [
            *("--nnodes", "3", "--node-rank", str(number), "--nproc-per-node", "2"),
            *("--master-addr", "small-0", "--master-port", "29500"),
        ]
        assert words[start + 11 :] == [*COMMAND, *resumes]
    # For TP groups Megatron asserts this one.
    usual = ["CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_DEVICE_MAX_CONNECTIONS=1", "torchrun"]
    assert small[:3] == same[:3] == usual
    assert big[:4] == [usual[0], "CUDA_VISIBLE_DEVICES=1,2", *usual[1:]]


def test_gpus_of_a_node_are_in_the_order_of_its_ranks(run, tmp_path):
    grid = Grid(layers=(1, 1, 1, 1, 1, 3), width=1, micro_batch_size=2, mode="none")
    write_plan(tmp_path, grid, ORDER)
    result = run("launch", *FILES, "--torchrun", "--", "pretrain_gpt.py", *FLAGS)
    assert result.exit_code == 0, result.output
    *_, big = commands(result.stdout)
    assert big[:3] == ["CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=2,1", "torchrun"]
    assert "# On big: ranks 4 to 5, 1 T4, 1 A100-40" in result.stdout


def cluster_of(nodes):
    text = "\n".join(
        f"  - {{name: n{number}, gpus: [{', '.join(f'1 x {KINDS[rank % 3]}' for rank in ranks)}], "
        "nics: 1 Gb/s}"
        for number, ranks in enumerate(nodes)
    )
    return parse_cluster(f"nodes:\n{text}".encode())


@pytest.mark.slow
@given(layouts())
def test_any_layouts_ranks_are_on_the_gpus_that_it_means(layout):
    """As torchrun numbers them, and as Slurm with one task on each node."""
    grid, _, nodes, order = layout
    cluster = cluster_of(nodes)
    ordered = in_order(cluster, order)
    training = stock_training_of(["x.py"], ["--a"], grid.tensor)
    lines = torchrun_lines(ordered, training, master_address=None, master_port=1)
    found = []
    for words, name in zip(
        commands(lines), re.findall(r"^# On (\w+):", lines, re.MULTILINE), strict=True
    ):
        variables = dict(word.split("=") for word in words[: words.index("torchrun")])
        count = int(words[words.index("--nproc-per-node") + 1])
        numbers = variables.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
        node = next(node for node in cluster.nodes if node.name == name)
        found += [node.first_rank + int(number) for number in numbers.split(",")]
    assert tuple(found) == order
    components = components_of(ordered, {})
    script = batch_script(components, training, BatchOptions(), title="t")
    kinds = [node.gpu_kinds for component in components for node in component.nodes]
    assert kinds == [node.gpu_kinds for node in ordered.nodes]
    gpus = re.search(r"^GPUS=\(([\d, ]+)\)", script, re.MULTILINE)[1].split()
    assert gpus == [",".join(map(str, node.numbers)) for node in ordered.nodes]
    tasks = tasks_of(script, lambda _asked, count: ["n"] * count)
    assert len(tasks) == len(nodes)


def test_the_scripts_nodes_run_torchrun(run, tmp_path):
    """What a task does on each node, with Slurm's variables and a python that says how it was
    started."""
    (tmp_path / "python").write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*"\n')
    (tmp_path / "srun").write_text(
        "#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n"
        'for SLURM_PROCID in 0 1 2; do export SLURM_PROCID; "$@"; done\n'
    )
    for name in ("python", "srun"):
        (tmp_path / name).chmod(0o755)
    options = ("--slurm", "x.sh", "--sbatch", "cpus-per-task=4", "--partition", "A100-40=big")
    result = run("launch", *FILES, *options, "--python", "./python", "--", *COMMAND)
    assert result.exit_code == 0, result.output
    script = (tmp_path / "x.sh").read_text()
    asked = [
        re.findall(r"^#SBATCH (.*)$", block, re.MULTILINE)
        for block in script.split("#SBATCH hetjob")
    ]
    assert [
        each
        for each in asked[0]
        if each.startswith(("--nodes", "--ntasks", "--gpus", "--cpus", "--exclusive"))
    ] == ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--cpus-per-task=8"]
    # Two GPUs of a node that has more.
    whole = ["--ntasks-per-node=1", "--gpus-per-node=3", "--exclusive", "--cpus-per-task=8"]
    assert asked[1] == ["--partition=big", "--nodes=1", *whole, "--no-requeue"]
    assert "zorse_megatron" not in script and "--zorse" not in script
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script
    assert "--cpus-per-task" not in script[script.index("\nsrun") :]
    # Slurm has given other GPUs than the first ones.
    slurm = {"SLURMD_NODENAME": "small-0", "SLURM_JOB_ID": "9", "CUDA_VISIBLE_DEVICES": "4,6,7"}
    said = subprocess.run(
        ["bash", "x.sh"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **slurm},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert [line.split()[0] for line in said] == ["4,6", "4,6", "6,7"]
    for number, line in enumerate(said):
        assert line.split()[1:] == [
            *("-m", "torch.distributed.run", "--nnodes", "3", "--node-rank", str(number)),
            *("--nproc-per-node", "2", "--master-addr", "small-0", "--master-port", "20063"),
            *(*COMMAND, *LAYOUT),
        ]


def test_a_job_that_saves_goes_back_into_the_queue(run, tmp_path):
    result = run("launch", *FILES, "--slurm", "x.sh", "--", *COMMAND, *SAVED)
    assert result.exit_code == 0, result.output
    script = (tmp_path / "x.sh").read_text()
    assert script.count("#SBATCH --requeue") == 2 and "#SBATCH --signal=B:USR1@120" in script
    # torchrun would end ranks that save after 30 s.
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}" in script
    assert "scontrol requeue" in script and "d/latest_checkpointed_iteration.txt" in script


def test_flags_that_agree_are_said_once(run):
    more = ("--micro-batch-size=2", "--overlap-grad-reduce", "--recompute-granularity", "full")
    result = run("launch", *FILES, "--torchrun", "--", *COMMAND, *more)
    assert result.exit_code == 0, result.output
    for words in commands(result.stdout):
        assert words[-len(LAYOUT) :] == list(LAYOUT)
        assert words.count("--overlap-grad-reduce") == 1 and more[0] not in words


def test_selective_recomputation_has_two_names(run, tmp_path):
    write_plan(tmp_path, dataclasses.replace(GRID, mode="selective", recomputed=None))
    for flag in (("--recompute-activations",), ("--recompute-granularity", "selective")):
        result = run("launch", *FILES, "--torchrun", "--", *COMMAND, *flag)
        assert result.exit_code == 0, result.output
        (words, *_) = commands(result.stdout)
        assert words[-2:] == ["--recompute-granularity", "selective"]
        assert words.count(flag[0]) == (flag[0] == "--recompute-granularity")


def test_another_micro_batch_size_is_replaced_as_under_a_plan(run):
    """Megatron asks for one, so every command has it."""
    result = run("launch", *FILES, "--torchrun", "--", *COMMAND, "--micro-batch-size", "4")
    assert result.exit_code == 0, result.output
    for words in commands(result.stdout):
        assert [words[at + 1] for at, word in enumerate(words) if word == "--micro-batch-size"] == [
            "2"
        ]
    assert "# note: --micro-batch-size 4 becomes 2, the layout's" in result.stdout


def test_what_plans_refuse_but_stock_can_do_is_left_to_it(run, tmp_path):
    write_plan(tmp_path)
    more = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    result = run("launch", *FILES, "--torchrun", "--", *COMMAND, *more)
    assert result.exit_code == 0, result.output
    assert all(set(more) < set(words) for words in commands(result.stdout))
    under_a_plan = ("launch", *FILES[:-1], "--torchrun", "--", *COMMAND, *more)
    assert "--optimizer-cpu-offload: found" in run(*under_a_plan).output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--pipeline-model-parallel-size", "2"), "found 2; expected 3, as the layout has"),
        (("--tensor-model-parallel-size", "4"), "found 4; expected 2, as the layout has"),
        (("--num-layers-per-virtual-pipeline-stage", "1"), "found 1; expected no such flag"),
        (("--recompute-activations",), "--recompute-activations: found it; expected no such flag"),
        (("--recompute-num-layers", "2"), "found 2; expected 1, as the layout has"),
        (("--no-overlap-p2p-communication",), "found it; expected no such flag, as the layout"),
        (("--use-tp-pp-dp-mapping",), "found it; expected no such flag, as the layout has"),
        (("--zorse-metrics", "m"), "--zorse-metrics: found it in the training command"),
        (("--bf16",), "--fp16, --bf16: found --bf16"),
        (("--num-layers", "9"), "model.num_layers: found 8, while the model has 9"),
        (("--context-parallel-size", "2"), "found 2; expected 1, as the layout has"),
        (("--save", "a", "--load", "b"), "--load: found b, while --save says a"),
        (("--eval-interval", "0"), "--eval-interval: found 0; expected a number of iterations"),
        (("--save", "d"), "--save-interval: found no such flag, beside --save; expected a number"),
    ],
)
def test_commands_that_contradict_the_layout(run, tmp_path, more, said):
    command = list(COMMAND)
    if more == ("--bf16",):
        groups = json.loads((tmp_path / "plan.json").read_text())
        for group in groups["groups"]:
            group["compute_dtype"] = "fp16"
        (tmp_path / "plan.json").write_text(json.dumps(groups))
        command.remove("--fp16")
    result = run("launch", *FILES, "--torchrun", "--", *command, *more)
    assert result.exit_code == 1
    assert said in result.output


def test_all_contradictions_are_told_at_once(run):
    more = ("--tensor-model-parallel-size", "4", "--recompute-method", "uniform")
    result = run("launch", *FILES, "--torchrun", "--", *FLAGS, *more)
    assert result.exit_code == 1
    assert "the training command does not fit the layout (3 problems)" in result.output
    assert "no script at the start of the training command" in result.output


def test_a_plan_that_stock_cannot_run(run, tmp_path):
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["groups"][1]["grad_reduce_dtype"] = "bf16"
    plan["groups"][2]["recompute"] = {"mode": "none"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = run("launch", *FILES, "--torchrun", "--", *COMMAND)
    assert result.exit_code == 1
    assert "plan.json is no layout of stock Megatron (2 problems)" in result.output
    for where in ("groups[1].grad_reduce_dtype", "groups[2].recompute"):
        assert f"{where}: found" in result.output


def test_a_nodes_partition_is_that_of_its_first_gpu_whatever_the_order(run, tmp_path):
    grid = Grid(layers=(1, 1, 1, 1, 1, 3), width=1, micro_batch_size=2, mode="none")
    write_plan(tmp_path, grid, ORDER)
    options = ("--slurm", "x.sh", "--partition", "A100-40=big")
    result = run("launch", *FILES, *options, "--", "pretrain_gpt.py", *FLAGS)
    assert result.exit_code == 0, result.output
    script = (tmp_path / "x.sh").read_text()
    assert "--partition=big" in script[script.index("hetjob") :]
    assert in_order(load_cluster("cluster.yaml"), ORDER).nodes[-1].gpu_kinds == ("T4", "A100-40")
