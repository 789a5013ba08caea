"""A report of `zorse doctor` that somebody was sent: printed again, as a table, or refused."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from tests.unit.test_docs import MADE_BY
from tests.unit.test_doctor import A100, machine
from zorse_megatron.cli.main import app
from zorse_megatron.doctor.report import (
    Report,
    dump_report,
    failed,
    load_report,
    not_possible,
    passed,
)

A_REPORT = Report(
    version="0.1.0",
    date="2026-11-26T06:00:00+00:00",
    machine=machine(A100, A100, engine="2.9"),
    checks=(
        dataclasses.replace(
            passed("4 layers", iteration_s=0.4281, peak_bytes=2**33, time_error=-0.024, layers=4),
            title="Prediction",
        ),
        dataclasses.replace(
            failed("differs\n\x1b[1mmuch", abs_loss=float("nan"), copy_bytes_per_s=3e12),
            title="Plan 2|1|2",
            remedy="Report it",
        ),
        dataclasses.replace(not_possible("no CUDA device"), title="Speed"),
    ),
)


def read_back(path, *words):
    return CliRunner().invoke(app, ["doctor", "--read", str(path), *words])


def test_a_report_is_read_back_as_it_was_printed_and_as_a_table(tmp_path):
    path = tmp_path / "sent.json"
    path.write_text(dump_report(A_REPORT))
    assert load_report(path) == A_REPORT
    result = read_back(path)
    assert result.exit_code == 1  # as of the doctor that wrote it
    printed, table = result.stdout.split("\n\n")
    assert printed.splitlines() == [
        "pass: Prediction: 4 layers",
        "fail: Plan 2|1|2: differs",
        "\\x1b[1mmuch. Report it",
        "not possible here: Speed: no CUDA device",
        "1 pass, 1 fail, 1 not possible here",
    ]
    heading, line, *rows = table.splitlines()
    assert MADE_BY.search(heading)
    assert heading == (
        "| Check | Result | Measured by zorse doctor 0.1.0 on GPU: 2 x NVIDIA A100-SXM4-40GB "
        "(42 GB), driver 580.65.06, torch 2.13.0, NCCL 2.29, Transformer Engine 2.9, 2026-11-26 |"
    )
    assert line == "| --- | --- | --- |" and rows == [
        "| Prediction | pass | `iteration_s` 428 ms, `peak_bytes` 8.00 GiB, `time_error` -2.4 %, "
        "`layers` 4 |",
        "| Plan 2\\|1\\|2 | fail | differs \\x1b[1mmuch; `abs_loss` no number, "
        "`copy_bytes_per_s` 3.0 TB/s |",
        "| Speed | not possible here | no CUDA device |",
    ]
    answer = json.loads(read_back(path, "--json").stdout)
    assert (answer["ok"], answer["summary"]) == (False, A_REPORT.summary)
    assert answer["checks"][1]["figures"]["abs_loss"] is None
    on_cpu = dataclasses.replace(A_REPORT, machine=machine())
    assert MADE_BY.search(on_cpu.as_table().splitlines()[0])


TEXT_OF_REPORT = dump_report(A_REPORT)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ["no readable file"]),
        ("", ["an empty file"]),
        (TEXT_OF_REPORT[:300], ["it looks cut off", "Copy or write the file again"]),
        (TEXT_OF_REPORT.replace("1,", "2,", 1), ["written by a newer version", "Update zorse-meg"]),
        ("[]", ["is not a report", "Give the doctor.json that zorse doctor has written"]),
        (
            '{"schema_version": 2, "groups": []}',
            ["is not a report", "neither a machine nor checks"],
        ),
        ('{"checks": [], "a": 1}', ['unknown key "a"', 'no key "machine"', 'no key "date"']),
        (
            TEXT_OF_REPORT.replace('"not possible', '"im\\u001bpossible').replace("16", '"16"'),
            ["machine.num_processors: found", "checks[2].status: found", "a control character"],
        ),
    ],
)
def test_a_file_that_is_no_report_is_told_with_all_that_is_wrong(text, said, tmp_path):
    path = tmp_path / "sent.json"
    if text is not None:
        path.write_text(text)
    result = read_back(path)
    assert result.exit_code == 1 and not result.stdout
    assert [words for words in (*said, str(path)) if words not in result.stderr] == []


def test_a_report_is_read_or_made(tmp_path):
    result = read_back(tmp_path / "sent.json", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "Leave --out or --read out" in result.stderr and "Leave --quick" in result.stderr
