"""Which rank a process is, from the environments that torchrun and srun make."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import LaunchError
from zorse_megatron.launch.rank_environment import hosts_in, launched_rank

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-11]",
    "SLURMD_NODENAME": "gpu09",
}


def test_torchrun_says_which_rank_this_is() -> None:
    place = launched_rank(TORCHRUN, "worker")
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("torchrun", 5, 8, 1)
    assert (place.node, place.master_address, place.master_port) == ("worker", "head", 29500)
    assert place.torch_environment() == TORCHRUN


def test_srun_says_it_too_and_rank_0_is_on_the_first_host() -> None:
    place = launched_rank(SRUN, "host")
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("srun", 3, 8, 1)
    assert (place.node, place.master_address) == ("gpu09", "gpu08")


def test_every_rank_of_a_step_has_the_same_port_and_another_step_another_one() -> None:
    ports = {launched_rank(SRUN | {"SLURM_PROCID": str(n)}, "host").master_port for n in range(8)}
    assert len(ports) == 1
    assert launched_rank(SRUN | {"SLURM_STEP_ID": "1"}, "host").master_port not in ports


def test_ranks_of_all_components_of_a_heterogeneous_job_have_the_same_port() -> None:
    """As Slurm 22.05 sets them: the second component has a number of its own."""
    first = {"SLURM_JOB_ID_HET_GROUP_0": "812", "SLURM_JOB_ID_HET_GROUP_1": "813"}
    port = launched_rank(SRUN | first, "host").master_port
    assert launched_rank(SRUN | first | {"SLURM_JOB_ID": "813"}, "host").master_port == port
    without = {name: value for name, value in SRUN.items() if name != "SLURM_JOB_ID"}
    assert launched_rank(without | first, "host").master_port == port
    assert launched_rank(without | {"SLURM_JOBID": "812"}, "host").master_port == port


def test_rank_0_of_a_heterogeneous_job_is_in_its_first_component() -> None:
    component = {"SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]", "SLURM_STEP_NODELIST": "b[1-4]"}
    assert launched_rank(SRUN | component, "host").master_address == "a1"


def test_what_the_user_sets_comes_first() -> None:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "ZORSE_NODE_NAME": "left"}
    place = launched_rank(SRUN | own, "host")
    assert (place.node, place.master_address, place.master_port) == ("left", "127.0.0.1", 1234)


def test_torchrun_inside_a_slurm_job_is_torchrun() -> None:
    assert launched_rank(SRUN | TORCHRUN, "host").rank == 5


def test_a_process_started_by_hand_is_alone() -> None:
    place = launched_rank({}, "host")
    assert (place.launcher, place.rank, place.world_size, place.node) == ("none", 0, 1, "host")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_one_process_in_an_allocation_of_several_tasks_is_told_of_srun(
    step: dict[str, str],
) -> None:
    shell = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | step
    with pytest.raises(LaunchError, match="Put srun in front"):
        launched_rank(shell, "host")


def test_every_missing_variable_is_named() -> None:
    with pytest.raises(LaunchError) as caught:
        launched_rank({"RANK": "one", "WORLD_SIZE": "2"}, "host")
    assert [problem.where for problem in caught.value.problems] == [
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]


def test_a_rank_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(LaunchError, match="rank 8 of 8"):
        launched_rank(TORCHRUN | {"RANK": "8"}, "host")


_NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=4)


@given(prefix=_NAMES, numbers=st.lists(st.integers(0, 999), min_size=1, max_size=6, unique=True))
def test_a_list_in_brackets_is_each_of_its_hosts(prefix: str, numbers: list[int]) -> None:
    inner = ",".join(f"{number:03}" for number in numbers)
    assert list(hosts_in(f"{prefix}[{inner}],z")) == [*(f"{prefix}{n:03}" for n in numbers), "z"]


@given(prefix=_NAMES, first=st.integers(0, 50), count=st.integers(1, 20))
def test_a_range_is_every_number_in_it(prefix: str, first: int, count: int) -> None:
    last = first + count - 1
    expected = [f"{prefix}{number:02}-ib" for number in range(first, last + 1)]
    assert list(hosts_in(f"{prefix}[{first:02}-{last:02}]-ib")) == expected
