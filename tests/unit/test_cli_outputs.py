"""What the commands write: checked before the work, never half, and never lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli_samples import FLAGS, WORKLOAD, lab_plan, write_lab
from zorse_megatron.plan.plan_file import load_plan, parse_plan

# Which plan is found does not matter here.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_layouts", "little_effort")]

PLAN = ("plan", *WORKLOAD)
EXPLAIN = ("explain", "plan.json", "--cluster", "cluster.yaml", "--model", "model.json")
LAUNCH = ("launch", "plan.json", "--cluster", "cluster.yaml", "--slurm", "train.sh")
TWO = "nodes: [{gpus: 2 x T4}]"
COMPARE = ("compare", *PLAN[1:])


def told(result, *said):
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    text = " ".join(result.output.split())
    for part in said:
        assert part in text


def stop(*_args, **_kwargs):
    raise AssertionError("the work was begun")


OUTPUTS = {
    "plan": ((*PLAN, "--out"), "zorse_megatron.planner.find_plan.find_plan"),
    "timeline": ((*EXPLAIN, "--timeline"), "zorse_megatron.cli.commands.explain.simulated"),
    "trace": ((*EXPLAIN, "--trace"), "zorse_megatron.cli.commands.explain.simulated"),
    "launch": ((*LAUNCH[:-1],), "zorse_megatron.cli.commands.launch.load_plan"),
    "compare": ((*COMPARE, "--out"), "zorse_megatron.cli.commands.emulate._compared"),
    "discover": (("discover", "--out"), "zorse_megatron.cli.commands.measure.as_ranks"),
}


@pytest.mark.parametrize(("command", "work"), OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("place", ["/proc/x", "pipe", "directory/full"])
def test_outputs_are_checked_before_the_work(command, work, place, run, monkeypatch):
    ending = {"--timeline": ".png", "--trace": ".json"}.get(command[-1], "")
    os.mkfifo(f"pipe{ending}")
    (Path() / "directory").mkdir()
    (Path() / "directory" / f"full{ending}").symlink_to("/dev/full")
    monkeypatch.setattr(work, stop)
    more = ("--", *FLAGS) if command[0] == "launch" else ()
    expected = {"/proc/x": "/proc", "pipe": "FIFO", "directory/full": "device"}[place]
    found = "a file" if command[0] == "compare" and place != "/proc/x" else expected
    told(run(*command, f"{place}{ending}", *more), found)
    assert os.path.islink(Path() / "directory" / f"full{ending}")


def test_two_outputs_to_one_path(run, tmp_path):
    (tmp_path / "link").symlink_to("a")
    for other in ("a", "./a", "link", tmp_path / "a"):
        told(
            run(*PLAN, "--out", "a", "--html", other),
            f"--html {other if other != './a' else 'a'}: found the file of --out",
        )
    assert not (tmp_path / "a").exists()
    told(run("discover", "--out", "a.json", "--profile", "./a.json"), "found the file of --out")


def test_nothing_that_a_command_reads_is_replaced(run, tmp_path):
    (tmp_path / "link.yaml").symlink_to("model.json")
    said = "found a file that this command reads"
    told(run(*PLAN, "--out", "link.yaml"), said)
    told(run(*PLAN, "--out", "model.json"), said)
    told(run(*EXPLAIN, "--trace", "model.json"), said)
    told(run(*EXPLAIN[:-1], "none.json", "--trace", "none.json"), "cannot read")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_plan_that_was_found_is_kept(as_json, run, tmp_path, monkeypatch):
    (tmp_path / "cluster.yaml").write_text(TWO)
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(kept))
    monkeypatch.setattr("zorse_megatron.cli.plan_options.refuse_unwritable", lambda *_, **__: None)
    result = run(*PLAN, "--out", "no/plan.json", *(["--json"] if as_json else []))
    (file,) = kept.iterdir()
    told(result, f"What was to be written is in {file}.")
    assert load_plan(file).world_size == 2
    if as_json:
        answer = json.loads(result.stdout)
        assert (answer["ok"], answer["written"]) == (False, str(file))
        assert parse_plan(json.dumps(answer["plan"]).encode()) == load_plan(file)


def test_the_plan_is_printed_where_nothing_takes_a_file(run, tmp_path, monkeypatch):
    (tmp_path / "cluster.yaml").write_text(TWO)
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    monkeypatch.setattr("zorse_megatron.cli.plan_options.refuse_unwritable", lambda *_, **__: None)
    result = run(*PLAN, "--out", "/proc/plan.json")
    told(result, "/proc/plan.json could not be written")
    assert parse_plan(result.stdout[result.stdout.index("\n{") :].encode()).world_size == 2


def test_an_edited_script_is_not_overwritten(run, tmp_path):
    script, words = tmp_path / "train.sh", ("--", *FLAGS)
    assert run(*LAUNCH, *words).exit_code == 0
    written = script.read_text()
    assert run(*LAUNCH, *words).exit_code == 0  # the same
    assert run(*LAUNCH, "--sbatch", "time=1:00:00", *words).exit_code == 0  # as it was written
    other = script.read_text()
    assert other != written
    script.write_text(other.replace("--time=1:00:00", "--time=9:00:00"))
    told(run(*LAUNCH, *words), "edited since zorse launch wrote it", "--force")
    assert "--time=9:00:00" in script.read_text()
    assert run(*LAUNCH, "--force", *words).exit_code == 0
    assert script.read_text() == written
    script.write_text("#!/bin/bash\nmine\n")
    told(run(*LAUNCH, *words), "a file that zorse launch did not write")
    assert script.read_text() == "#!/bin/bash\nmine\n"


def test_outputs_keep_their_mode_and_link(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text(TWO)
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "p.json").touch(mode=0o600)
    (tmp_path / "link.json").symlink_to("place/p.json")
    result = run(*PLAN, "--out", "link.json")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "place" / "p.json").stat().st_mode & 0o777 == 0o600
    assert load_plan(tmp_path / "place" / "p.json").world_size == 2
    assert [each.name for each in (tmp_path / "place").iterdir()] == ["p.json"]


PRINTED = {
    "a table": ("check", "plan.json"),
    "JSON": ("check", "plan.json", "--json"),
}


@pytest.mark.parametrize("command", PRINTED.values(), ids=PRINTED)
def test_a_full_stdout_is_one_line(command, tmp_path):
    write_lab(tmp_path)
    with open("/dev/full", "wb") as full:
        done = zorse(command, tmp_path, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "stdout: found No space left on device" in done.stderr


def test_a_closed_pipe_ends_without_a_word(tmp_path):
    write_lab(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(lab_plan()))
    reading, writing = os.pipe()
    os.close(reading)
    done = zorse(("check", "plan.json", "--actions"), tmp_path, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def zorse(command, directory, **options):
    return subprocess.run(
        [sys.executable, "-m", "zorse_megatron", *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        **options,
    )
