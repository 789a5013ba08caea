"""Which GPUs to train on: the search against every selection that can be reached."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.unit.planner_cases import random_case
from zorse_megatron.cli.main import app
from zorse_megatron.planner.inputs.other_gpus import on_ranks
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.selection.explore import explore, short_search
from zorse_megatron.planner.selection.fewer import Selection, fewer
from zorse_megatron.planner.selection.points import Aim, Objective, Point, frontier
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster

PRICES = {"fast": 4.0, "middle": 1.5, "slow": 0.5}
# The T4s are across a line so slow that every activation takes longer than they save.
LAB = """
nodes:
  - {name: near, gpus: 2 x A100-40, nics: 100 Gb/s, price_per_gpu_hour: 3, region: here}
  - {name: old, gpus: 2 x V100-16, nics: 100 Gb/s, price_per_gpu_hour: 0.2, region: here}
  - {name: far, gpus: 2 x T4, nics: 10 Gb/s, price_per_gpu_hour: 1, region: there}
between_regions: [{bandwidth: 50 Mb/s, latency: 50 ms}]
"""
WORKLOAD = ["--model", "llama-1b", "--global-batch-size", "32", "--dtype", "float16"]


def reachable(inputs: Inputs) -> Iterator[Selection]:
    """All selections that some steps of leaving out come to."""
    todo = [tuple(range(inputs.world_size))]
    seen = set(todo)
    while todo:
        selection = todo.pop()
        yield selection
        more = [each for each in fewer(inputs, selection) if each not in seen]
        seen.update(more)
        todo += more


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "aim"), [(1, "cheapest"), (8, "fastest"), (7, "cheapest")])
def test_no_selection_is_better(seed: int, aim: Aim) -> None:
    """Also none of those that the bound ruled out."""
    inputs, evaluate = random_case(seed), short_search("zorse")
    prices = [PRICES[kind] for kind in inputs.kinds]
    objective = Objective(aim=aim)
    found = explore(inputs, evaluate, objective=objective, prices_per_hour=prices)
    every = [
        Point(
            ranks=ranks,
            iteration_s=evaluate(on_ranks(inputs, ranks)),
            tokens=inputs.global_batch_size,
            price_per_hour=sum(prices[rank] for rank in ranks),
        )
        for ranks in reachable(inputs)
    ]
    assert len(found) <= len(every)
    assert found[0] == min(every, key=objective.rank)
    assert set(frontier(found)) == set(frontier(every))


@given(
    rows=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8),
    most=st.integers(1, 9),
)
def test_the_best_is_on_the_frontier(rows: list[tuple[int, int]], most: int) -> None:
    """By any aim and budget; and nothing on the frontier is beaten, by definition."""
    points = [
        Point(ranks=(number,), iteration_s=seconds, tokens=10**9, price_per_hour=price * 3600)
        for number, (seconds, price) in enumerate(rows)
    ]
    best = frontier(points)
    values = [(point.iteration_s, point.price_per_gtoken) for point in best]
    assert values == sorted(values)
    assert [price for _, price in values] == sorted((price for _, price in values), reverse=True)
    for objective in (Objective(), Objective(aim="cheapest"), Objective(most_per_gtoken=most)):
        chosen = min(points, key=objective.rank)
        assert (chosen.iteration_s, chosen.price_per_gtoken) in values
        assert objective.allows(chosen) == any(
            seconds * price <= most or objective.most_per_gtoken is None for seconds, price in rows
        )


@pytest.fixture(name="lab")
def lab_file(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """In a directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(LAB)
    return tmp_path


def planned(*options: str) -> tuple[int, dict]:
    """Exit status and answer."""
    words = [
        "plan",
        "--cluster",
        "lab.yaml",
        *WORKLOAD,
        "--seq-length",
        "512",
        "--max-tp",
        "1",
        "--json",
        *options,
    ]
    result = CliRunner().invoke(app, words)
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_gpus_that_slow_the_others_are_spares(lab) -> None:
    """The plan, its cluster file and the picture; other commands take the two files."""
    outputs = ["--out", "plan.json", "--used-cluster", "used.yaml", "--frontier", "points.png"]
    status, answer = planned("--may-leave-out", *outputs)
    assert status == 0
    assert answer["left_out_ranks"] == [4, 5]
    everything = next(each for each in answer["selections"] if len(each["ranks"]) == 6)
    assert answer["iteration_s"] < everything["iteration_s"]
    used = parse_cluster((lab / "used.yaml").read_bytes())
    assert [node.name for node in used.nodes] == ["near", "old"]
    checked = CliRunner().invoke(app, ["check", "plan.json", "used.yaml"])
    assert checked.exit_code == 0, checked.output
    assert (lab / "points.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_cheapest_and_within_a_budget(lab) -> None:
    """The V100s are a fifteenth of the A100s' price; a budget below theirs allows nothing."""
    two_nodes = [line for line in LAB.splitlines() if "far" not in line and "between" not in line]
    (lab / "lab.yaml").write_text("\n".join(two_nodes))
    status, cheapest = planned("--objective", "cheapest")
    assert status == 0
    assert cheapest["used_ranks"] == [2, 3]
    rows = {tuple(each["ranks"]): each for each in cheapest["selections"]}
    least = rows[2, 3]["price_per_gtoken"]
    hours = cheapest["iteration_s"] / 3600
    assert least == pytest.approx(0.4 * hours / (32 * 512) * 1e9)
    assert min(each["iteration_s"] for each in rows.values()) < cheapest["iteration_s"]
    status, refused = planned("--budget", f"{0.5 * least}")
    assert status == 1
    assert f"{least:.4g} per 10^9 tokens" in refused["problems"][0]["found"]


def test_what_cannot_be_is_told_before_the_search(lab) -> None:
    """All of it at once, but for prices, which come after the other contents of files."""
    status, answer = planned("--may-leave-out", "--out", "plan.json", "--frontier", "points.jpg")
    assert status == 1
    assert [each["where"] for each in answer["problems"]] == ["--out", "--frontier"]
    status, answer = planned("--used-cluster", "used.yaml")
    assert (status, answer["problems"][0]["where"]) == (1, "--used-cluster")
    status, answer = planned("--objective", "cheap", "--budget", "-1")
    assert [each["where"] for each in answer["problems"]] == ["--objective", "--budget"]
    wrong = ["--strategy", "zors", "--wire", "fp8", "--budget", "0", "--out", "lab.yaml"]
    status, answer = planned(*wrong, "--used-cluster", "none/used.yaml")
    options = [each["where"].split()[0] for each in answer["problems"]]
    assert options == ["--strategy", "--budget", "--wire", "--out", "--used-cluster"]
    assert status == 1
    (lab / "lab.yaml").write_text(LAB.replace(", price_per_gpu_hour: 1,", ","))
    status, answer = planned("--objective", "cheapest")
    assert "no price of node far" in answer["problems"][0]["found"]
