"""`zorse explain`: what one iteration of a plan takes; test_cli_plan.py has the reasons."""

import json
import re

import pytest

from tests.unit.cli_samples import FLAGS, cells, lab_plan

BASE = ("explain", "plan.json", "--cluster", "cluster.yaml")


@pytest.fixture
def run(run):
    return lambda *more: run(*BASE, *more)


@pytest.fixture
def iteration_s(run):
    """What an iteration takes with these options."""
    return lambda *more: json.loads(run("--model", "model.json", "--json", *more).stdout)[
        "iteration_s"
    ]


def test_table_of_ranks_and_critical_path(run):
    result = run("--model", "model.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.match(r"plan.json: one iteration takes [\d.]+ ms: [\d,.]+ tokens/s ", lines[0])
    assert lines[0].endswith("tokens/s (16 samples of 512 tokens, float16)")
    rows = cells(result.stdout)
    assert [row[:3] for row in rows] == [
        ["0 new", "0 to 3", "A6000"],
        ["1 old", "4 to 7", "V100-16"],
    ]
    for row in rows:
        percents = [int(cell.removesuffix(" %")) for cell in row[3:7]]
        assert sum(percents) == pytest.approx(100, abs=2)
    assert any(re.match(r"Critical path: .*backward \d", line) for line in lines)
    assert any(re.match("Critical path by group: (new|old) ", line) for line in lines)
    assert any(line.startswith("No plan can take less than ") for line in lines)
    assert any(line.startswith("note: compute dtype float16, which every kind") for line in lines)
    assert any(line.startswith("note: V100-16: estimated: data-sheet peak") for line in lines)


def test_json_has_every_rank_and_adds_up(run):
    answer = json.loads(run("--model", "model.json", "--json").stdout)
    assert answer["fits_in_memory"] is True
    assert [rank["gpu_kind"] for rank in answer["ranks"]] == ["A6000"] * 4 + ["V100-16"] * 4
    for rank in answer["ranks"]:
        parts = [rank[f"{part}_s"] for part in ("busy", "communication", "wait", "idle")]
        assert sum(parts) == pytest.approx(answer["iteration_s"])
        assert sum(rank["at_peak_bytes"].values()) == rank["peak_memory_bytes"]
    for parts in (answer["critical_path"][f"by_{what}_s"] for what in ("work", "group")):
        assert sum(parts.values()) == pytest.approx(answer["iteration_s"])
    assert answer["tokens_per_s"] == pytest.approx(16 * 512 / answer["iteration_s"])


def test_the_model_may_come_from_flags(run):
    by_file = json.loads(run("--model", "model.json", "--json").stdout)
    # A config.json says nothing of dropout, and gradients in fp32.
    no_dropout = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    more = [*no_dropout, "--accumulate-allreduce-grads-in-fp32"]
    after = run("--json", "--", "pretrain_gpt.py", *FLAGS, *more)
    quoted = run("--json", "--model", " ".join([*FLAGS, *more]))
    for result in (after, quoted):
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["iteration_s"] == by_file["iteration_s"]


def test_a_slow_rank_slows_the_iteration(run):
    usual = json.loads(run("--model", "model.json", "--json").stdout)
    slow = run("--model", "model.json", "--json", "--slow", "3=1.5")
    by_rank = json.loads(slow.stdout)
    assert by_rank["ranks"][3]["busy_s"] == pytest.approx(1.5 * usual["ranks"][3]["busy_s"])
    assert by_rank["iteration_s"] > usual["iteration_s"]
    assert "limited_by" in usual and "limited_by" not in by_rank  # reasons are of what is usual
    by_kind = run("--model", "model.json", "--json", "--slow", "A6000=1.5").stdout
    assert json.loads(by_kind)["ranks"][0]["busy_s"] == pytest.approx(by_rank["ranks"][3]["busy_s"])
    assert [row[1] for row in cells(run("--model", "model.json", "--slow", "3=1.5").stdout)] == [
        "3",
        "0 to 2",
        "4 to 7",
    ]


def test_a_slow_link_slows_what_crosses_it(run, iteration_s):
    names = re.findall(r"\S+/nic0:out", run("--slow", "x=2", "--model", "model.json").output)
    usual_s = iteration_s()
    slow_s = max(iteration_s("--slow", f"{name.strip(',.')}=50") for name in names)
    assert slow_s > 1.01 * usual_s


def test_jitter_is_drawn_from_the_seed(iteration_s):
    first, second = (iteration_s("--jitter", "0.1", "--seed", seed) for seed in ("1", "2"))
    assert first != second
    assert first == iteration_s("--jitter", "0.1", "--seed", "1")
    assert iteration_s() == iteration_s("--seed", "2")


@pytest.mark.slow
def test_pictures_and_trace(run, tmp_path):
    names = {"timeline": "timeline.png", "trace": "trace.json"}
    options = [word for name, path in names.items() for word in (f"--{name}", path)]
    result = run("--model", "model.json", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"written: {', '.join(names.values())}"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_what_does_not_fit_is_simulated_and_said(run, tmp_path):
    plan = lab_plan()
    plan["model"] = {"num_layers": 40}
    plan["chunks"] = [{"group": 0, "layers": [0, 10]}, {"group": 1, "layers": [10, 40]}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    model = ("--model", "llama-13b", "--seq-length", "512")
    result = run(*model)
    assert result.exit_code == 0
    assert "does not fit: plan.json: groups[1], ranks 4 to 7: found" in result.stdout
    assert json.loads(run(*model, "--json").stdout)["fits_in_memory"] is False
    (tmp_path / "plan.json").write_text(json.dumps(lab_plan()))
    assert "does not fit" not in run("--model", "model.json").stdout
    tight = run("--model", "model.json", "--margin", "0.99").stdout
    assert "does not fit: plan.json: groups[0]" in tight
    assert "the memory of A6000 without 99 %" in tight
