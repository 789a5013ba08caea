"""Options that several commands share, and how their values are parsed."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from zorse_megatron.cli.command_group import training_flags
from zorse_megatron.cli.console import Output, refusal, reported_errors
from zorse_megatron.cli.workload import (
    MAX_GLOBAL_BATCH_SIZE,
    MAX_SIZE,
    Workload,
    model_or_flags,
    with_lora,
    workload_of,
)
from zorse_megatron.files.wording import did_you_mean
from zorse_megatron.plan.plan import Plan

T = TypeVar("T")
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.")]
StatusDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="What the run has as --zorse-status.")
]
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
        "float16 and float32 that every kind of GPU in the cluster supports. Where a plan is "
        "searched, auto is the same choice for each group of GPUs by itself.",
    ),
]
LoraText = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="ADAPTERS",
        help="Train adapters alone, as --zorse-lora in a training command: "
        "rank=16,alpha=32,targets=q,k,v,o,gate,up,down. Default: all weights.",
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
_AS_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print the result as JSON.")],
)

DEFAULT_MARGIN = 0.05


def with_bundles(command: Callable[..., T]) -> Callable[..., T]:
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
    def run(**values: Any) -> T:
        for name, bundle in bundles.items():
            fields = dataclasses.fields(bundle)
            values[name] = bundle(**{each.name: values.pop(each.name) for each in fields})
        return command(**values)

    by_name = inspect.Parameter.KEYWORD_ONLY
    _takes(run, [each.replace(annotation=hints[each.name], kind=by_name) for each in parameters])
    return run


def answers(
    command: Callable[..., Output | None], *, errors_to_stderr: bool = True
) -> Callable[..., None]:
    """Let a command, whose options may be in bundles, take `--json` and print what it returns.

    Its errors are printed, too. One that has a parameter `as_json` is told; one that returns None
    has printed itself.
    """
    bundled = with_bundles(command)
    signature = inspect.signature(bundled)
    is_told = "as_json" in signature.parameters

    @functools.wraps(bundled)
    def run(*, as_json: bool, **values: Any) -> None:
        more = {"as_json": as_json} if is_told else {}
        with reported_errors(to_stderr=errors_to_stderr, as_json=as_json):
            output = bundled(**values, **more)
        if output is not None:
            output.print(as_json=as_json)

    others = [each for name, each in signature.parameters.items() if name != "as_json"]
    _takes(run, [*others, _AS_JSON])
    return run


def _takes(command: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Say what a function takes that has its arguments by name."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}


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
    lora: LoraText = None

    @property
    def flags(self) -> tuple[str, ...] | None:
        """The training command's flags after `--`; None without a `--`."""
        return training_flags(self.context)

    @property
    def training_flags(self) -> tuple[str, ...] | None:
        """Those after `--`, or quoted as the model; None: there is no training command."""
        flags = model_or_flags(self.model, self.flags)[1]
        return None if flags is None else tuple(flags)

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
        flags = self.flags if flags is None else flags
        found = workload_of(
            model=self.model,
            flags=flags,
            global_batch_size=self.global_batch_size,
            seq_length=self.seq_length,
            dtype=self.dtype,
            dtype_may_be_auto=dtype_may_be_auto,
            plan=plan,
        )
        return with_lora(found, self.lora, has_command=self.training_flags is not None)


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


def given_options(context: typer.Context, names: Iterable[str]) -> Iterator[str]:
    """Yield those options that the command line itself has; `names`: of their parameters."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            yield f"--{name.replace('_', '-')}"
