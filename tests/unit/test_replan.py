"""Which nodes a job goes on with, and the plan for them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli_samples import FLAGS
from tests.unit.test_fewer_gpus import WHOLE
from tests.unit.test_move import weighted
from zorse_megatron.errors import LaunchError
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.launch.replan import Replanner, nodes_left
from zorse_megatron.plan.plan_file import dump_plan, load_plan

NAMES = tuple(node.name for node in WHOLE.nodes)
LAB = b"""
nodes:
  - {name: a, count: 2, gpus: 2 x A6000, nics: 100 Gb/s}
  - {name: b, gpus: 2 x V100-16, nics: 100 Gb/s}
"""


def reachable(start: str, regions: set[str]) -> set[str]:
    """Regions of the set that links inside it lead to."""
    found = {start}
    while True:
        more = {
            region
            for link in WHOLE.region_links
            if regions.issuperset(link.regions) and found.intersection(link.regions)
            for region in link.regions
        }
        if more <= found:
            return found
        found |= more


@given(present=st.sets(st.sampled_from(NAMES)))
def test_goes_on_with_the_largest_joined_part(present: set[str]) -> None:
    left = nodes_left(WHOLE, present)
    regions = {node.region for node in WHOLE.nodes if node.name in present}
    sizes = []
    for region in regions:
        joined = reachable(region, regions)
        sizes.append(
            sum(len(n.ranks) for n in WHOLE.nodes if n.name in present and n.region in joined)
        )
    assert len(left.ranks) == max(sizes, default=0)
    used = {node.region for node in left.nodes}
    assert all(reachable(region, used) == used for region in used)
    assert list(left.ranks) == sorted(left.ranks)
    assert {*left.names, *left.cut_off} == present
    assert set(left.lost) == set(NAMES) - present


def replanner(directory: Path, **options: Any) -> Replanner:
    (directory / "cluster.yaml").write_bytes(LAB)
    given: dict[str, Any] = {"training": tuple(FLAGS), **options}
    files = {"plan": directory / "plan.json", "cluster": directory / "cluster.yaml"}
    return Replanner(**files, directory=directory / "plans", **given)


@pytest.mark.slow
def test_a_plan_for_what_is_left_is_searched_once(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"options": ("--strategy", "zorse-paper")}
    first = replanner(tmp_path, **quick).files_for({"a-1", "b"})
    plan, cluster = load_plan(first.plan), load_cluster(first.cluster)
    assert first.is_new
    assert [node.name for node in cluster.nodes] == ["a-1", "b"]
    assert plan.cluster is not None
    assert plan.cluster.gpu_kinds == cluster.gpu_kinds == ("A6000",) * 2 + ("V100-16",) * 2
    ranks = [r for group in plan.groups for replica in group.replicas for r in replica.ranks]
    assert sorted(ranks) == list(range(4))
    # No search: there is no such program.
    again = replanner(tmp_path, python="/nowhere", **quick).files_for({"b", "a-1", "unknown"})
    assert (again.plan, again.cluster, again.is_new) == (first.plan, first.cluster, False)
    # Another command or another cost model is another search.
    others: list[dict[str, Any]] = [
        {**quick, "training": (*FLAGS, "--seed", "2")},
        {},
    ]
    for other in others:
        with pytest.raises(LaunchError, match="/nowhere: found No such file"):
            replanner(tmp_path, python="/nowhere", **other).files_for({"a-1", "b"})


def test_another_profile_is_another_search(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    names = set()
    for text in ("1", "2", "2"):
        profile.write_text(text)
        for options in (("--profile", str(profile)), (f"--profile={profile}",)):
            names.add(replanner(tmp_path, options=options)._name("cluster"))
    assert len(names) == 2 * 2


def test_the_given_plan_is_that_for_all_nodes(tmp_path: Path) -> None:
    files = replanner(tmp_path).files_for({"a-0", "a-1", "b"})
    assert (files.plan, files.cluster) == (tmp_path / "plan.json", tmp_path / "cluster.yaml")
    assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize("damage", ["plan is empty", "no plan", "no cluster", "other cluster"])
def test_damaged_files_are_made_anew(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dump_plan(weighted(1.0, 1.0))
    monkeypatch.setattr(
        Replanner, "_search", lambda self, cluster, plan, saved: plan.write_text(made)
    )
    first = replanner(tmp_path).files_for({"a-1", "b"})
    assert first.is_new and not replanner(tmp_path).files_for({"a-1", "b"}).is_new
    {
        "plan is empty": lambda: first.plan.write_text(""),
        "no plan": first.plan.unlink,
        "no cluster": first.cluster.unlink,
        "other cluster": lambda: first.cluster.write_bytes(LAB),
    }[damage]()
    again = replanner(tmp_path).files_for({"a-1", "b"})
    assert again.is_new and again.plan.read_text() == made
    assert [node.name for node in load_cluster(again.cluster).nodes] == ["a-1", "b"]


def test_too_few_gpus_end_the_job_with_what_is_saved(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"2 of 6 GPUs \(without a-0, b\).*at least 3"):
        replanner(tmp_path, min_gpus=3).files_for({"a-1"})
    with pytest.raises(LaunchError, match="No checkpoint has been saved"):
        replanner(tmp_path).files_for(set())


@pytest.mark.slow
def test_why_there_is_no_plan_is_said_by_the_planner(tmp_path: Path) -> None:
    given: dict[str, Any] = {"training": ("--num-layers", "8"), "options": ("--strategy", "stock")}
    with pytest.raises(
        LaunchError, match=r"(?s)no plan for the nodes.*No checkpoint.*--hidden-size"
    ):
        replanner(tmp_path, **given).files_for({"b"})
    assert not list((tmp_path / "plans").glob("*.json"))


@pytest.mark.slow
def test_a_search_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(LaunchError, match=r"no plan after 0\.2 s"):
        replanner(tmp_path, python=str(slow), limit_s=0.2).files_for({"b"})


def test_a_lost_region_cuts_off_what_it_joined() -> None:
    east = {node.name for node in WHOLE.nodes if node.region == "east"}
    left = nodes_left(WHOLE, set(NAMES) - east)
    assert (set(left.lost), left.cut_off) == (east, ("far",))
