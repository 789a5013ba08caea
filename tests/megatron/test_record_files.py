"""What a run records is checked before it trains, on the rank that writes; nothing is lost."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.comparison import BASE_FLAGS
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.plans import LAYOUTS
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.live.watched_rank import BAD_INPUT
from zorse_megatron.plan.plan_file import save_plan

FLAGS = (
    *BASE_FLAGS,
    *("--train-iters", "2", "--mock-data", "--split", "90,5,5"),
    *TOKENIZER_FLAGS,
)


def refused(result: RunResult, *facts: str) -> None:
    assert set(result.returncodes) == {BAD_INPUT}, result.outputs
    assert " iteration " not in "".join(result.outputs)
    assert "Traceback" not in "".join(result.outputs)
    for fact in facts:
        assert "".join(result.outputs).count(fact) == 1, result.outputs[0]


def test_all_that_cannot_be_written_is_told_at_once_before_training(tmp_path: Path) -> None:
    save_plan(LAYOUTS["2|1"], tmp_path / "plan.json")
    (tmp_path / "file").touch()
    # Only rank 1 has this one in its way.
    (tmp_path / "memory" / "memory-rank1.json").mkdir(parents=True)
    words = (
        *("--zorse-plan", str(tmp_path / "plan.json"), "--zorse-trace", str(tmp_path / "file")),
        *("--zorse-memory", str(tmp_path / "memory"), "--zorse-metrics", "/dev/full"),
    )
    refused(
        run_ranks([*FLAGS, *words], 3, timeout_s=60),
        f"ranks 0 to 2: --zorse-trace {tmp_path / 'file'}: found a file",
        "rank 1: --zorse-memory: memory-rank1.json",
        "rank 2: --zorse-metrics /dev/full: found a device",
        "(3 problems)",
    )


def test_a_stock_run_checks_its_metrics(tmp_path: Path) -> None:
    words = ("--zorse-metrics", str(tmp_path))
    refused(
        run_ranks([*FLAGS, *words], 2, timeout_s=60),
        f"rank 1: --zorse-metrics {tmp_path}: found a directory",
    )


def test_megatron_writes_its_parameter_groups_under_a_plan(tmp_path: Path) -> None:
    save_plan(LAYOUTS["2|1"], tmp_path / "plan.json")
    words = ("--zorse-plan", str(tmp_path / "plan.json"))
    words += ("--dump-param-to-param-group-map", str(tmp_path / "groups"))
    run_ranks([*FLAGS, *words], 3, timeout_s=60).check()
    assert (tmp_path / "groups" / ".metadata").exists()


@pytest.mark.parametrize("flag", ["--zorse-trace", "--zorse-metrics"])
def test_what_can_no_longer_be_written_ends_in_a_message(flag: str, tmp_path: Path) -> None:
    """The disk is full once training has begun."""
    save_plan(LAYOUTS["2|1"], tmp_path / "plan.json")
    place = tmp_path / "records"
    words = ("--zorse-plan", str(tmp_path / "plan.json"), flag, str(place))
    result = run_ranks([*FLAGS, *words], 3, entry="tests.megatron.full_disk_entry", timeout_s=60)
    assert "Traceback" not in "".join(result.outputs)
    assert "iteration        2/" in result.outputs[-1]
    if flag == "--zorse-metrics":
        assert result.returncodes == (0, 0, 0)  # trained to the end without them
        assert result.outputs[2].count("No space left on device") == 1
        assert place.read_text() == ""
    else:
        assert set(result.returncodes) == {BAD_INPUT}
        assert all(
            "trace-rank" in output and "No space left on device" in output
            for output in result.outputs
        )
        assert list(place.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for one checkpoint of these flags, and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1700k", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only who may mount file systems has a disk that is full")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_in_a_save_is_named(tmp_path: Path, small_disk: Path) -> None:
    """With a traceback of stock's on every rank nobody learned which disk it was, and what of."""
    save_plan(LAYOUTS["2|1"], tmp_path / "plan.json")
    words = ("--zorse-plan", str(tmp_path / "plan.json"))
    words += ("--save", str(small_disk / "saved"), "--save-interval", "1")
    result = run_ranks([*FLAGS, *words], 3, timeout_s=60)
    assert set(result.returncodes) == {BAD_INPUT}
    said = "".join(result.outputs)
    assert "Traceback" not in said and said.count("zorse: error") == 1
    found = re.search(r"found No space left on device: ([\d,]+) of 1,740,800 bytes are free", said)
    assert found is not None and int(found[1].replace(",", "")) < 1 << 20
    assert f"--save {small_disk / 'saved'}" in said and f"on the disk {small_disk};" in said
    assert re.search(r"room for about 1,\d\d\d,\d\d\d bytes, as the last one has", said)
    assert "The checkpoint of iteration 1 is complete." in said
