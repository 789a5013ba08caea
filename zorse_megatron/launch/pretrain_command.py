"""The command line of `zorse_megatron.pretrain`: our flags, checked, and Megatron's, left alone."""

from collections.abc import Mapping, Sequence
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
    if script is not None and not script.is_file():
        problems.append(_no_script(script))
    if ours["--zorse-plan"] is None:
        problems += [_needs_plan(flag) for flag in _NEED_PLAN if ours[flag] is not None]
    limit_bytes, host_limit_bytes = (
        _limit_bytes(flag, ours[flag], problems)
        for flag in ("--zorse-memory-limit", "--zorse-host-memory-limit")
    )
    update = _choice("--zorse-update", ours, _UPDATES, _CHOSEN, problems)
    damaged = _choice("--zorse-damaged-checkpoint", ours, ("stop", "skip"), _SKIPPED, problems)
    rebalance = _choice("--zorse-rebalance", ours, ("on", "off"), _REBALANCED, problems)
    counting = {"--zorse-rebalance": rebalance == "on", "--zorse-status": ours["--zorse-status"]}
    if _BATCH_SCHEDULE in (word.partition("=")[0] for word in megatron):
        problems += [_counts_by_batches(flag) for flag, given in counting.items() if given]
    timeouts = _timeouts(ours["--zorse-silence-limit"], problems)
    lora = None if ours[LORA_FLAG] is None else parse_lora(ours[LORA_FLAG], problems)
    if problems:
        raise FlagError("The command cannot be used", problems)
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
            memory_limit_bytes=limit_bytes,
            host_memory_limit_bytes=host_limit_bytes,
            update=update or "auto",
            skips_damaged=damaged == "skip",
            rebalances=rebalance == "on",
            lora=lora,
        ),
        timeouts=timeouts,
        megatron=megatron,
    )


_BATCH_SCHEDULE = "--step-batch-size-schedule"


def _counts_by_batches(flag: str) -> Problem:
    return Problem(
        where=flag,
        found=f"the flag with {_BATCH_SCHEDULE}",
        expected="batches of one size, by which it counts",
        remedy="Leave it out until the batch has its final size.",
    )


def _ours(
    words: Sequence[str], problems: list[Problem]
) -> tuple[Mapping[str, str | None], tuple[str, ...]]:
    """Our flags with their values, and Megatron's words; notes problems with ours."""
    found, megatron = split_ours(words)
    ours: dict[str, str | None] = dict.fromkeys(_OURS)
    for given in found:
        if given.flag in _REMOVED:
            problems.append(_removed_flag(given.flag))
        elif given.flag not in ours:
            problems.append(_unknown_flag(given.flag))
        elif not given.values:
            problems.append(_no_value(given.flag))
        elif ours[given.flag] is not None:
            problems.append(_given_twice(given.flag))
        else:
            ours[given.flag] = given.values[0]
    return ours, megatron


def _limit_bytes(flag: str, text: str | None, problems: list[Problem]) -> int | None:
    """Read a number of gigabytes; notes a problem with anything else."""
    if text is None:
        return None
    try:
        limit_bytes = float(text) * 1e9
    except ValueError:
        limit_bytes = 0.0
    if 1 <= limit_bytes < float("inf"):
        return int(limit_bytes)
    problems.append(
        Problem(
            where=flag,
            found=f"{text!r}",
            expected="a number of gigabytes (10^9 bytes), more than 0",
            remedy=f"Write, for example, {flag} 14.5.",
        )
    )
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


def _timeouts(text: str | None, problems: list[Problem]) -> Timeouts:
    """Read a number of seconds; notes a problem with anything else."""
    if text is None:
        return Timeouts()
    try:
        silence_s = float(text)
    except ValueError:
        silence_s = 0.0
    if not LEAST_SILENCE_S <= silence_s < float("inf"):
        problems.append(
            Problem(
                where="--zorse-silence-limit",
                found=f"{text!r}",
                expected=f"a number of seconds, at least {LEAST_SILENCE_S:g}",
                remedy="Leave it out for 15; torchrun and the batch script wait for 30 and 60.",
            )
        )
        return Timeouts()
    return Timeouts(silence_s=silence_s)


def _unknown_flag(flag: str) -> Problem:
    return Problem(
        where=flag,
        found="an unknown flag",
        expected=f"one of {', '.join(_OURS)}",
        remedy="Check the spelling.",
    )


def _removed_flag(flag: str) -> Problem:
    return Problem(
        where=flag,
        found="a flag that was removed",
        expected=f"one of {', '.join(_OURS)}",
        remedy=_REMOVED[flag],
    )


def _needs_plan(flag: str) -> Problem:
    return Problem(
        where=flag,
        found="no --zorse-plan",
        expected="a plan, which the flag is about",
        remedy=f"Add --zorse-plan PATH, or leave {flag} out.",
    )


def _given_twice(flag: str) -> Problem:
    return Problem(
        where=flag, found="it given twice", expected="it once", remedy="Leave one of them out."
    )


def _no_value(flag: str) -> Problem:
    return Problem(where=flag, found="no value", expected="one", remedy=f"Write {flag} VALUE.")


def _no_script(script: Path) -> Problem:
    return Problem(
        where=str(script),
        found="no such file",
        expected="your training script, e.g. pretrain_gpt.py",
        remedy="Correct the path, or leave it out to run the built-in GPT entry.",
    )
