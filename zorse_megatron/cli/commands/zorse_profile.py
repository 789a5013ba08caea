"""`zorse profile`: measure, correct and show profiles."""

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as Grid
from rich.text import Text

from zorse_megatron.cli.after_dashes import TakesTrainingFlags
from zorse_megatron.cli.command_group import AnswersInJson
from zorse_megatron.cli.commands.zorse_profile_correct import correct
from zorse_megatron.cli.commands.zorse_profile_measure import measure_profile
from zorse_megatron.cli.console import print_plain, print_table, reported_errors
from zorse_megatron.cli.options import AsJson
from zorse_megatron.costs.curve import Replaced, fit_curve
from zorse_megatron.costs.unlikely import unlikely_times
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.profile.profile import Profile, Times
from zorse_megatron.schema.profile.profile_json import load_profile
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.json_text import layout

profile = typer.Typer(
    cls=AnswersInJson,
    no_args_is_help=True,
    help="Measure, correct and show profiles of layer times and memory.",
)
profile.command("measure", cls=TakesTrainingFlags)(measure_profile)
profile.command("correct", cls=TakesTrainingFlags)(correct)
# Below this a correction is the rounding of a fall between two points.
_SMALL_CHANGE = 0.005


@profile.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="The profile file.")],
    as_json: AsJson = False,
) -> None:
    """Summarize a profile, and list the measured points that the fitted curves replace."""
    with reported_errors(as_json=as_json):
        loaded = load_profile(path)
    summary = _summary(loaded)
    if as_json:
        typer.echo(layout({"ok": True, **summary}))
        return
    print_plain(f"{path}: {counts_of(loaded)}")
    grid = Grid("GPU", "Models", "Sequence lengths", "Dtypes", "Series", "Points")
    for kind, facts in summary["gpu_kinds"].items():
        cells = [", ".join(map(str, facts[key])) for key in ("models", "seq_lengths", "dtypes")]
        grid.add_row(*map(Text, [kind, *cells, str(facts["series"]), str(facts["points"])]))
    print_table(grid)
    for entry in summary["not_believed"]:
        print_plain(_sentence(entry))
    for each in summary["unlikely"]:
        print_plain(f"unlikely: {each}")


def counts_of(loaded: Profile) -> str:
    messages = f", {len(loaded.transfers)} series of messages" if loaded.transfers else ""
    return (
        f"{len(loaded.times)} series of times on "
        f"{number_of(len(loaded.gpu_kinds()), 'kind of GPU', 'kinds of GPU')}, "
        f"{number_of(len(loaded.updates), 'optimizer step')}, "
        f"{number_of(len(loaded.memory), 'memory entry', 'memory entries')}, "
        f"{number_of(len(loaded.links), 'link')}{messages}"
    )


def _summary(loaded: Profile) -> dict[str, Any]:
    by_kind: dict[str, list[Times]] = defaultdict(list)
    for times in loaded.times:
        by_kind[times.gpu_kind].append(times)
    return {
        "sources": [dataclasses.asdict(source) for source in loaded.sources],
        "gpu_kinds": {
            kind: {
                "models": list(dict.fromkeys(times.model for times in entries)),
                "seq_lengths": sorted({times.seq_length for times in entries}),
                "dtypes": sorted({times.dtype for times in entries}),
                "series": len(entries),
                "points": sum(len(times.micro_batch_sizes) for times in entries),
            }
            for kind, entries in by_kind.items()
        },
        "unlikely": list(unlikely_times(loaded, GPU_KINDS)),
        "not_believed": [entry for times in loaded.times for entry in _not_believed(times)],
    }


def _not_believed(times: Times) -> list[dict[str, Any]]:
    entries = []
    for direction in ("forward", "backward"):
        _, points = fit_curve(times.micro_batch_sizes, getattr(times, f"{direction}_s"))
        entries += [
            {
                "gpu_kind": times.gpu_kind,
                "model": times.model,
                "seq_length": times.seq_length,
                "dtype": times.dtype,
                "tensor_parallel": times.tensor_parallel,
                "part": times.part,
                "direction": direction,
                **dataclasses.asdict(point),
            }
            for point in points
            if _is_large(point)
        ]
    return entries


def _is_large(point: Replaced) -> bool:
    return abs(point.used_s - point.measured_s) > _SMALL_CHANGE * point.used_s


def _sentence(entry: dict[str, Any]) -> str:
    return (
        f"replaced: {entry['gpu_kind']}, {entry['model']} at sequence length "
        f"{entry['seq_length']} in {entry['dtype']}, tensor parallel {entry['tensor_parallel']}, "
        f"{entry['part']} {entry['direction']}, micro-batch {entry['micro_batch_size']}: "
        f"{1e3 * entry['measured_s']:.3f} ms, used {1e3 * entry['used_s']:.3f} ms"
    )
