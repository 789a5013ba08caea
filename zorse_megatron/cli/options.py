"""Options that several commands share, and how their values are parsed."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from zorse_megatron.cli.command_group import training_flags
from zorse_megatron.cli.console import refusal
from zorse_megatron.cli.workload import MAX_GLOBAL_BATCH_SIZE, MAX_SIZE, Workload, workload_of
from zorse_megatron.errors import Problem
from zorse_megatron.files.wording import did_you_mean
from zorse_megatron.plan.plan import Plan

T = TypeVar("T")
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.")]
ClusterFile = Annotated[
    Path, typer.Option("--cluster", metavar="YAML", help="The cluster file: GPUs and links.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A Hugging Face config.json or its folder, a well-known model such as llama-7b, or "
        "your training command's flags in quotes. You can also put those flags after --.",
    ),
]
Profiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--profile",
        metavar="JSON",
        help="Measured times of layers and links; repeatable. Published figures fill the gaps.",
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_GLOBAL_BATCH_SIZE, help="Samples per iteration."),
]
SeqLength = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_SIZE, help="Tokens per sample. Default: the model's."),
]
DtypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Compute dtype: bfloat16, float16, tf32 or float32. Default: the first of bfloat16, "
        "float16 and float32 that every kind of GPU supports.",
    ),
]
DtypeOrAuto = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Compute dtype: bfloat16, float16, tf32 or float32. Default: the first of bfloat16, "
        "float16 and float32 that every kind of GPU in the cluster supports. auto: the same choice "
        "for each group of GPUs by itself.",
    ),
]
Iterations = Annotated[
    int, typer.Option(min=2, max=1000, help="Iterations to train; the first is a warm-up.")
]
Margin = Annotated[
    float,
    typer.Option(
        help="Share of each GPU's memory reserved for fragmentation and what is not counted."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

DEFAULT_MARGIN = 0.05
_LARGEST_FACTOR = 1e6


def with_bundles(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options: each field is an option of its own.

    They stand where the parameter is, with the field's annotation and default.
    """
    hints = _hints(command)
    bundles: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        bundle: Any = hints[name]
        if dataclasses.is_dataclass(bundle):
            bundles[name] = bundle
            parameters += inspect.signature(bundles[name]).parameters.values()
            hints |= _hints(bundle)
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, bundle in bundles.items():
            fields = dataclasses.fields(bundle)
            values[name] = bundle(**{each.name: values.pop(each.name) for each in fields})
        command(**values)

    by_name = [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in parameters
    ]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in by_name}
    return run


def _hints(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated, include_extras=True)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is trained: the options of every command that costs a plan, or makes one."""

    context: typer.Context
    model: Model = None
    profile: Profiles = None
    global_batch_size: GlobalBatchSize = None
    seq_length: SeqLength = None
    dtype: DtypeName = None

    @property
    def flags(self) -> tuple[str, ...] | None:
        """The training command's flags after `--`; None without a `--`."""
        return training_flags(self.context)

    @property
    def profiles(self) -> list[Path]:
        """Files of profiles."""
        return self.profile or []

    @property
    def inputs(self) -> list[Path | str | None]:
        """Files that no output may replace."""
        return [self.model, *self.profiles]

    def workload(
        self,
        plan: Plan | None = None,
        *,
        flags: Sequence[str] | None = None,
        dtype_may_be_auto: bool = False,
    ) -> Workload:
        """Return what is trained; see `workload_of`. `flags`: in place of those after `--`."""
        return workload_of(
            model=self.model,
            flags=self.flags if flags is None else flags,
            global_batch_size=self.global_batch_size,
            seq_length=self.seq_length,
            dtype=self.dtype,
            dtype_may_be_auto=dtype_may_be_auto,
            plan=plan,
        )


@dataclass(frozen=True, kw_only=True)
class PlannedWorkload(WorkloadOptions):
    """The same for a command that plans: each group may have a dtype of its own."""

    dtype: DtypeOrAuto = None


def factors(texts: Sequence[str]) -> dict[str, float]:
    """Key -> factor, of those texts that are `KEY=FACTOR`."""
    return dict(pair for text in texts if (pair := _factor(text)) is not None)


def factor_problems(texts: Sequence[str], option: str) -> Iterator[Problem]:
    """Yield every text that is something else, and every key that has two factors."""
    keys = [pair[0] for text in texts if (pair := _factor(text)) is not None]
    for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
        yield Problem(
            where=option,
            found=f'"{key}" {keys.count(key)} times',
            expected="one factor for each",
            remedy="Leave out all but one.",
        )
    for text in texts:
        if _factor(text) is None:
            yield Problem(
                where=option,
                found=f'"{text}"',
                expected="NAME=FACTOR with a factor above 0",
                remedy=f"For example, {option} {text.partition('=')[0] or 3}=1.3 is 30 % slower.",
            )


def _factor(text: str) -> tuple[str, float] | None:
    key, _, number = text.rpartition("=")
    factor = _number(number)
    if not key or factor is None or not 0 < factor <= _LARGEST_FACTOR:
        return None
    return key, factor


def checked_share(value: float, option: str) -> float:
    """Return a share of at least 0 and below 1. Raises CommandError for any other number."""
    if 0 <= value < 1:  # NaN is neither
        return value
    raise refusal(
        option,
        f"{value}",
        "a share: at least 0 and below 1",
        "0.05 is one twentieth.",
    )


def one_of(names: Sequence[T], name: str, option: str, remedy: str = "") -> T:
    """Return the one of that name. Raises CommandError for another text."""
    for known in names:
        if name == known:
            return known
    all_of_them = [str(known) for known in names]
    remedy = remedy or did_you_mean(name, all_of_them)
    raise refusal(option, f'"{name}"', f"one of {', '.join(all_of_them)}", remedy)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line itself has an option, by its parameter's name."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
