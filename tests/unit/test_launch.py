"""What zorse launch writes brings every rank to the node and the GPU that the plan means."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli_samples import FLAGS
from zorse_megatron.errors import LaunchError
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.launch.batch_script import (
    OWN_OPTIONS,
    BatchOptions,
    batch_script,
    components_of,
)
from zorse_megatron.launch.rank_environment import launched_rank, torch_environment
from zorse_megatron.launch.training_command import TrainingCommand, torchrun_lines, training_of

SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"
TRAINING = TrainingCommand(
    words=("pretrain_gpt.py", "--num-layers", "4", "--save", "a b"), resumes=True, save="a b"
)
KINDS = ("A100-40", "T4", "L4")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Nodes of up to three kinds in any order, also several kinds in one node."""
    gpus = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(KINDS)), min_size=1, max_size=2)
    nodes = draw(st.lists(gpus, min_size=1, max_size=6))
    names = draw(st.permutations([f"n{number}" for number in range(len(nodes))]))
    lines = [
        f"  - {{name: {name}, gpus: [{', '.join(f'{n} x {kind}' for n, kind in node)}], "
        "nics: 10 Gb/s}"
        for name, node in zip(names, nodes, strict=True)
    ]
    return parse_cluster("\n".join(["nodes:", *lines, ""]).encode())


PARTITIONS = st.dictionaries(st.sampled_from(["", *KINDS]), st.sampled_from(["p", "q"]))


def script_of(cluster: Cluster, partitions: dict[str, str], **options: Any) -> str:
    present = {key: value for key, value in partitions.items() if key in {"", *cluster.gpu_kinds}}
    components = components_of(cluster, present)
    return batch_script(components, TRAINING, BatchOptions(**options), title="Trains.")


def asked_for(script: str) -> list[dict[str, str]]:
    """The options of each component."""
    head = script[: script.index("\nPYTHON=")]
    return [
        dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", block, re.MULTILINE))
        for block in head.split("#SBATCH hetjob")
    ]


def tasks_of(script: str, pick: Any) -> list[dict[str, str]]:
    """The tasks that Slurm starts: by component, in blocks of nodes, in Slurm's order of nodes.

    `pick(component, number)` returns the names of its nodes.
    """
    components = asked_for(script)
    nodes = [
        (name, int(asked["ntasks-per-node"]))
        for asked in components
        for name in pick(asked, int(asked["nodes"]))
    ]
    places = [(name, local) for name, tasks in nodes for local in range(tasks)]
    (groups,) = set(re.findall(r"--het-group=([\d,]+)", script)) or {"0"}
    assert groups == ",".join(map(str, range(len(components))))
    return [
        {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(len(places)),
            "SLURM_LOCALID": str(local),
            "SLURMD_NODENAME": name,
            "SLURM_STEP_NODELIST": nodes[0][0],
        }
        for rank, (name, local) in enumerate(places)
    ]


def variables_of(task: dict[str, str], cluster: Cluster | None) -> dict[str, str]:
    return torch_environment(launched_rank(task, "host"), task, cluster)


@pytest.mark.slow
@given(cluster=clusters(), partitions=PARTITIONS)
def test_any_nodes_that_slurm_picks_have_the_gpus_of_their_ranks(
    cluster: Cluster, partitions: dict[str, str]
) -> None:
    script = script_of(cluster, partitions)
    free = list(cluster.nodes)
    kinds_of = {node.name: node.gpu_kinds for node in free}
    expected = {node: partitions.get(node.gpu_kinds[0], partitions.get("")) for node in free}

    def pick(asked: dict[str, str], number: int) -> list[str]:
        """Its nodes as the file names them, in the other order: nothing says which are taken."""
        taken = [free.pop(0) for _ in range(number)]
        assert {expected[node] for node in taken} == {asked.get("partition")}
        assert {len(node.gpu_kinds) for node in taken} == {int(asked["gpus-per-node"])}
        return [node.name for node in reversed(taken)]

    tasks = tasks_of(script, pick)
    assert not free
    for task in tasks:
        found = variables_of(task, None)
        kind = kinds_of[task["SLURMD_NODENAME"]][int(found["LOCAL_RANK"])]
        assert cluster.gpu_kinds[int(found["RANK"])] == kind
    assert len(tasks) == cluster.world_size


@pytest.mark.slow
@given(cluster=clusters(), partitions=PARTITIONS, data=st.data())
def test_named_nodes_have_their_own_ranks_in_any_order(
    cluster: Cluster, partitions: dict[str, str], data: st.DataObject
) -> None:
    script = script_of(cluster, partitions, names_nodes=True)

    def pick(asked: dict[str, str], number: int) -> list[str]:
        names = asked["nodelist"].split(",")
        assert len(names) == number
        return data.draw(st.permutations(names))

    found = {}
    for task in tasks_of(script, pick):
        variables = variables_of(task, cluster)
        found[int(variables["RANK"])] = (task["SLURMD_NODENAME"], int(variables["LOCAL_RANK"]))
        assert variables["MASTER_ADDR"] == cluster.nodes[0].name
        assert variables["WORLD_SIZE"] == str(cluster.world_size)
    assert found == {
        rank: (node.name, rank - node.first_rank) for node in cluster.nodes for rank in node.ranks
    }


@pytest.mark.slow
@given(cluster=clusters())
def test_torchrun_gives_ranks_out_as_the_file_does(cluster: Cluster) -> None:
    text = torchrun_lines(cluster, TRAINING, master_address=None, master_port=1234)
    assert re.findall(r"^# On (\S+):", text, re.MULTILINE) == [node.name for node in cluster.nodes]
    commands = [shlex.split(line) for line in text.splitlines() if line and line[0] != "#"]
    first = 0
    for number, (words, node) in enumerate(zip(commands, cluster.nodes, strict=True)):
        given = dict(zip(words[2::2], words[3::2], strict=False))
        assert given["--node-rank"] == str(number)
        assert given["--nnodes"] == str(len(cluster.nodes))
        alone = len(cluster.nodes) == 1
        assert given["--master-addr"] == ("localhost" if alone else cluster.nodes[0].name)
        # Ranks of a node follow those of all nodes with a lower number.
        assert node.first_rank == first
        first += int(given["--nproc-per-node"])
        assert words[-len(TRAINING.words) :] == list(TRAINING.words)
    assert first == cluster.world_size


CLUSTER = parse_cluster(
    b"nodes:\n"
    b"  - {name: a, gpus: 2 x T4, nics: 1 Gb/s}\n"
    b"  - {name: b, gpus: 1 x T4, nics: 1 Gb/s}\n"
)
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "b.cluster.example",
    "SLURM_STEP_NODELIST": "a,b",
}


def test_the_only_node_is_found_by_any_name() -> None:
    alone = parse_cluster(b"nodes:\n  - {name: new, gpus: 2 x T4}\n")
    text = torchrun_lines(alone, TRAINING, master_address=None, master_port=1234)
    assert "--master-addr localhost " in text
    named = torchrun_lines(alone, TRAINING, master_address="10.0.0.1", master_port=1234)
    assert "--master-addr 10.0.0.1 " in named


def test_a_nodes_domain_does_not_matter() -> None:
    assert variables_of(TASK, CLUSTER)["RANK"] == "2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURMD_NODENAME": "c"}, 'found this task on node "c", which the file does not have'),
        ({"SLURM_LOCALID": "1"}, "found task 1 of node b"),
        ({"SLURM_NTASKS": "4"}, "found 4 tasks in this step"),
    ],
)
def test_a_job_on_other_nodes_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        variables_of(TASK | change, CLUSTER)


def test_torchruns_ranks_stay_as_they_are() -> None:
    words = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    environment = dict.fromkeys(words, "1") | {"WORLD_SIZE": "3", "MASTER_ADDR": "a"}
    assert torch_environment(launched_rank(environment, "b"), environment, CLUSTER) == {}


def test_a_command_that_saves_goes_on_from_there() -> None:
    found = training_of(["x.py", "--save", "d"], plan="p", cluster="c")
    more = ("--zorse-plan", "p", "--zorse-cluster", "c", "--load", "d", "--exit-signal-handler")
    skips = ("--zorse-damaged-checkpoint", "skip")
    assert found.words == ("x.py", "--save", "d", *more, *skips)
    assert found.resumes and found.save == "d"


def test_what_the_command_says_already_is_not_said_twice() -> None:
    damaged = "--zorse-damaged-checkpoint=stop"
    given = ["--save=d", "--load=d", "--exit-signal-handler", damaged]
    assert training_of(given, plan="p", cluster=None).words == (*given, "--zorse-plan", "p")


@pytest.mark.parametrize("load", ["d/", "./d", "{here}/d", "e/../d", "link"])
def test_one_folder_may_be_spelt_in_two_ways(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("d")
    given = ["--save", "d", "--load", load.format(here=tmp_path)]
    assert training_of(given, plan="p", cluster=None).resumes


def test_a_command_that_does_not_save_is_not_requeued() -> None:
    training = training_of(["--num-layers", "4"], plan="p", cluster=None)
    script = batch_script(components_of(CLUSTER, {}), training, BatchOptions(), title="Trains.")
    assert not training.resumes
    assert "#SBATCH --no-requeue" in script
    assert "scontrol" not in script and "&\n" not in script


def test_cores_are_asked_for_twice_as_srun_does_not_take_them_over() -> None:
    script = script_of(CLUSTER, {}, more=("cpus-per-task=8", "time=1:00:00"))
    (srun,) = re.findall(r"^srun .*$", script, re.MULTILINE)
    assert "--cpus-per-task=8" in srun and "--time" not in srun
    assert all(asked["cpus-per-task"] == "8" for asked in asked_for(script))


# What the script starts: ranks that save and end when they are told to, and Slurm's answers.
COMMANDS = {
    "srun": """\
echo $$ >srun.pid
trap "exit 0" TERM
echo started
for _ in {1..600}; do sleep 0.1; done""",
    "scancel": 'kill -TERM "$(cat srun.pid)"',
}


def started_job(
    directory: Path, commands: dict[str, str], **variables: str
) -> "subprocess.Popen[str]":
    """The script, with these lines of shell instead of Slurm's commands."""
    (directory / "a b").mkdir()
    for name, lines in commands.items():
        (directory / name).write_text(f"#!/bin/bash\n{lines}\n")
        (directory / name).chmod(0o755)
    (directory / "train.sh").write_text(script_of(CLUSTER, {}))
    return subprocess.Popen(
        ["bash", "train.sh"],
        cwd=directory,
        env={"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stopped_job(directory: Path, commands: dict[str, str], **variables: str) -> tuple[str, int]:
    """What the script says and its status, where Slurm stops it, as before the time limit."""
    with started_job(directory, commands, **variables) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "started\n"
        job.send_signal(signal.SIGUSR1)
        said = job.stdout.read()
    return said, job.returncode


@pytest.mark.parametrize("takes_it_back", [True, False])
def test_a_job_that_cannot_go_back_into_the_queue_has_not_completed(
    takes_it_back: bool, tmp_path: Path
) -> None:
    scontrol = f"echo asked $*; exit {0 if takes_it_back else 1}"
    said, status = stopped_job(tmp_path, {**COMMANDS, "scontrol": scontrol})
    assert "status 0 after 0 restarts: back into the queue\nasked requeue 7\n" in said
    assert status == (0 if takes_it_back else 1)
    assert ("Slurm does not take the job back" in said) is not takes_it_back


@pytest.mark.parametrize("slow", ["script", "scancel"])
def test_a_signal_is_heard_however_the_machine_is_loaded(slow: str, tmp_path: Path) -> None:
    """The script may be behind its ranks, and they may have ended when it is back from its trap."""
    commands = {**COMMANDS, "scontrol": "echo asked $*"}
    variables = {}
    if slow == "script":
        variables["BASH_ENV"] = str(tmp_path / "slow")
        (tmp_path / "slow").write_text("[[ $0 != train.sh ]] || trap 'sleep 0.05' DEBUG\n")
    else:
        until_ended = 'while kill -0 "$(cat srun.pid)" 2>/dev/null; do sleep 0.05; done; sleep 0.2'
        commands["scancel"] += f"\n{until_ended}"
    said, status = stopped_job(tmp_path, commands, **variables)
    assert "status 0 after 0 restarts: back into the queue\nasked requeue 7\n" in said
    assert status == 0


@pytest.mark.parametrize(
    ("at_the_end", "restarts", "goes_on"),
    [
        ("echo 8 >'a b/latest_checkpointed_iteration.txt'", 20, True),
        ("true", 19, True),
        ("true", 20, False),
        ("exit 2", 0, False),
    ],
    ids=["it saves", "not yet too often", "too often for nothing", "bad input"],
)
def test_a_job_that_is_stopped_before_it_saves_does_not_go_on_for_ever(
    at_the_end: str, restarts: int, goes_on: bool, tmp_path: Path
) -> None:
    (srun := dict(COMMANDS))["srun"] = COMMANDS["srun"].replace("exit 0", f"{at_the_end}; exit 0")
    commands = {**srun, "scontrol": "echo asked $*"}
    said, status = stopped_job(tmp_path, commands, SLURM_RESTART_COUNT=str(restarts))
    assert ("asked requeue 7" in said) is goes_on
    assert (status == 0) is goes_on, said


@pytest.mark.parametrize("status", [0, 2, 9])
def test_a_job_ends_with_the_status_of_its_ranks(status: int, tmp_path: Path) -> None:
    with started_job(tmp_path, {"srun": f"exit {status}", "scontrol": "exit 1"}) as job:
        said, _ = job.communicate()
    assert job.returncode == status
    assert ("Slurm does not take the job back" in said) is (status == 9)


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("names_nodes", [True, False])
def test_shellcheck_finds_nothing(resumes: bool, names_nodes: bool, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("found no shellcheck")
    training = TrainingCommand(words=TRAINING.words, resumes=resumes)
    options = BatchOptions(names_nodes=names_nodes, more=("time=1:00:00",))
    script = tmp_path / "train.sh"
    script.write_text(batch_script(components_of(CLUSTER, {}), training, options, title="Trains."))
    subprocess.run(["shellcheck", str(script)], check=True)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_our_jobs(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("found no shellcheck")
    subprocess.run(["shellcheck", "--external-sources", str(script)], check=True)


def test_the_example_is_what_the_command_writes(run: Callable[..., Any], tmp_path: Path) -> None:
    options = ["--partition", "A6000=new", "--partition", "old", "--sbatch"]
    training = [*FLAGS, "--save", "checkpoints", "--save-interval", "100"]
    words = ["--cluster", "cluster.yaml", "--slurm", "train.sh", *options, "time=24:00:00"]
    result = run("launch", "plan.json", *words, "--", "pretrain_gpt.py", *training)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "train.sh").read_text() == (SCRIPTS / "train-example.sh").read_text()


def test_the_command_prints_lines(run: Callable[..., Any]) -> None:
    files = ["plan.json", "--cluster", "cluster.yaml"]
    result = run("launch", *files, "--torchrun", "--master-addr", "10.0.0.1", "--", *FLAGS)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("--master-addr 10.0.0.1 --master-port 29500") == 2


def test_options_that_the_script_writes_are_not_taken_from_the_user() -> None:
    scripts = [
        batch_script(
            components_of(CLUSTER, {"": "p"}),
            TrainingCommand(words=TRAINING.words, resumes=resumes),
            BatchOptions(names_nodes=True),
            title="Trains.",
        )
        for resumes in (True, False)
    ]
    written = re.findall(r"^#SBATCH --([\w-]+)", "".join(scripts), re.MULTILINE)
    assert {"nodes", "signal", "requeue", "no-requeue", "nodelist", "output"} <= set(written)
    assert set(written) <= OWN_OPTIONS.keys()


def test_names_are_no_lines_of_the_script(run: Callable[..., Any], tmp_path: Path) -> None:
    plan = (tmp_path / "plan.json").rename(tmp_path / "of\ntouch b")
    options = ["--cluster", "cluster.yaml", "--slurm", "x.sh", "--sbatch", "comment=two words"]
    result = run("launch", plan.name, *options, "--", *FLAGS)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "x.sh").read_text().splitlines()
    assert lines[1].startswith("# Trains under of touch b (plan ")
    assert lines.count("#SBATCH '--comment=two words'") == 2
    cluster = (tmp_path / "cluster.yaml").read_text().replace("name: new", r'name: "n\ntouch a"')
    (tmp_path / "cluster.yaml").write_text(cluster)
    result = run("launch", plan.name, *options, "--", *FLAGS)
    assert result.exit_code == 1
    assert r"found a control character (U+000A) in 'n\ntouch a'" in result.output
