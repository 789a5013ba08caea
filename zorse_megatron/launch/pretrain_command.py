"""The command line of `zorse_megatron.pretrain`: our flags, checked, and Megatron's, left alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from zorse_megatron.adapter.plan_run import RunOptions
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.flags.command import split_ours, split_script
from zorse_megatron.inputs.lora import LORA_FLAG, parse_lora
from zorse_megatron.live.root_cause import LEAST_SILENCE_S, Timeouts

_NEED_PLAN = (
    "--zorse-cluster",
    "--zorse-trace",
    "--zorse-memory",
    "--zorse-memory-limit",
    "--zorse-host-memory-limit",
    "--zorse-update",
    "--zorse-damaged-checkpoint",
    "--zorse-silence-limit",
    "--zorse-rebalance",
    "--zorse-status",
    LORA_FLAG,
)
_OURS = ("--zorse-plan", "--zorse-metrics", *_NEED_PLAN)
_UPDATES: tuple[Literal["auto", "stock", "fused"], ...] = ("auto", "stock", "fused")
_CHOSEN = "Leave it out to let the job choose; it says what it chose."
_SKIPPED = (
    "skip resumes from the newest complete checkpoint; without it, the job stops and says which "
    "one that is."
)
_REBALANCED = "on: replicas that are slower than planned get fewer micro-batches."
_Choice = TypeVar("_Choice", bound=str)
_BATCH_SCHEDULE = "--step-batch-size-schedule"
_NO_MIRROR = "Save more often instead: a smaller --save-interval, on GPUs with --async-save."
_REMOVED = {"--zorse-mirror": _NO_MIRROR, "--zorse-mirror-overlap": _NO_MIRROR}


@dataclass(frozen=True, kw_only=True)
class PretrainCommand:
    """The command line, split into ours and Megatron's."""

    script: Path | None
    plan: Path | None
    cluster: Path | None
    options: RunOptions
    timeouts: Timeouts
    megatron: tuple[str, ...]


def split_command(argv: Sequence[str]) -> PretrainCommand:
    """Split the arguments after the module name. Raises FlagError with all that is wrong."""
    name, words = split_script(argv)
    script = None if name is None else Path(name)
    problems: list[Problem] = []
    ours, megatron = _ours(words, problems)
    limits_gb = [
        _number(
            flag,
            ours,
            problems,
            least=1e-9,
            expected="a number of gigabytes (10^9 bytes), more than 0",
            remedy=f"Write, for example, {flag} 14.5.",
        )
        for flag in ("--zorse-memory-limit", "--zorse-host-memory-limit")
    ]
    silence_s = _number(
        "--zorse-silence-limit",
        ours,
        problems,
        least=LEAST_SILENCE_S,
        expected=f"a number of seconds, at least {LEAST_SILENCE_S:g}",
        remedy="Leave it out for 15; torchrun and the batch script wait for 30 and 60.",
    )
    update = _choice("--zorse-update", ours, _UPDATES, _CHOSEN, problems)
    damaged = _choice("--zorse-damaged-checkpoint", ours, ("stop", "skip"), _SKIPPED, problems)
    rebalance = _choice("--zorse-rebalance", ours, ("on", "off"), _REBALANCED, problems)
    problems += _misfits(script, ours, megatron, rebalances=rebalance == "on")
    lora = None if ours[LORA_FLAG] is None else parse_lora(ours[LORA_FLAG], problems)
    if problems:
        raise FlagError("The command cannot be used", problems)
    limits_bytes = [None if limit is None else int(limit * 1e9) for limit in limits_gb]
    paths = {flag: None if text is None else Path(text) for flag, text in ours.items()}
    return PretrainCommand(
        script=script,
        plan=paths["--zorse-plan"],
        cluster=paths["--zorse-cluster"],
        options=RunOptions(
            trace=paths["--zorse-trace"],
            memory=paths["--zorse-memory"],
            metrics=paths["--zorse-metrics"],
            status=paths["--zorse-status"],
            memory_limit_bytes=limits_bytes[0],
            host_memory_limit_bytes=limits_bytes[1],
            update=update or "auto",
            skips_damaged=damaged == "skip",
            rebalances=rebalance == "on",
            lora=lora,
        ),
        timeouts=Timeouts() if silence_s is None else Timeouts(silence_s=silence_s),
        megatron=megatron,
    )


def _ours(
    words: Sequence[str], problems: list[Problem]
) -> tuple[Mapping[str, str | None], tuple[str, ...]]:
    """Our flags with their values, and Megatron's words; notes problems with ours."""
    found, megatron = split_ours(words)
    ours: dict[str, str | None] = dict.fromkeys(_OURS)
    for flag, values in ((each.flag, each.values) for each in found):
        if flag not in ours:
            found_it = "a flag that was removed" if flag in _REMOVED else "an unknown flag"
            remedy = _REMOVED.get(flag, "Check the spelling.")
            wrong = (found_it, f"one of {', '.join(_OURS)}", remedy)
        elif not values:
            wrong = ("no value", "one", f"Write {flag} VALUE.")
        elif ours[flag] is not None:
            wrong = ("it given twice", "it once", "Leave one of them out.")
        else:
            ours[flag] = values[0]
            continue
        said, expected, remedy = wrong
        problems.append(Problem(where=flag, found=said, expected=expected, remedy=remedy))
    return ours, megatron


def _misfits(
    script: Path | None,
    ours: Mapping[str, str | None],
    megatron: Sequence[str],
    *,
    rebalances: bool,
) -> Iterator[Problem]:
    """What does not go with the rest of the command."""
    if script is not None and not script.is_file():
        yield Problem(
            where=str(script),
            found="no such file",
            expected="your training script, e.g. pretrain_gpt.py",
            remedy="Correct the path, or leave it out to run the built-in GPT entry.",
        )
    for flag in _NEED_PLAN if ours["--zorse-plan"] is None else ():
        if ours[flag] is not None:
            yield Problem(
                where=flag,
                found="no --zorse-plan",
                expected="a plan, which the flag is about",
                remedy=f"Add --zorse-plan PATH, or leave {flag} out.",
            )
    counting = {"--zorse-rebalance": rebalances, "--zorse-status": ours["--zorse-status"]}
    has_schedule = _BATCH_SCHEDULE in (word.partition("=")[0] for word in megatron)
    for flag, given in counting.items() if has_schedule else ():
        if given:
            yield Problem(
                where=flag,
                found=f"the flag with {_BATCH_SCHEDULE}",
                expected="batches of one size, by which it counts",
                remedy="Leave it out until the batch has its final size.",
            )


def _number(
    flag: str,
    ours: Mapping[str, str | None],
    problems: list[Problem],
    *,
    least: float,
    expected: str,
    remedy: str,
) -> float | None:
    """Read a number; None where there is none. Notes a problem with anything else."""
    text = ours[flag]
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if least <= value < float("inf"):
        return value
    problems.append(Problem(where=flag, found=f"{text!r}", expected=expected, remedy=remedy))
    return None


def _choice(
    flag: str,
    ours: Mapping[str, str | None],
    choices: tuple[_Choice, ...],
    remedy: str,
    problems: list[Problem],
) -> _Choice | None:
    """Read which of several words a flag has; None where it is not given.

    Notes a problem with any other one.
    """
    text = ours[flag]
    for known in choices:
        if text == known:
            return known
    if text is not None:
        several = f"one of {', '.join(choices)}" if len(choices) > 2 else " or ".join(choices)
        problems.append(Problem(where=flag, found=f"{text!r}", expected=several, remedy=remedy))
    return None
