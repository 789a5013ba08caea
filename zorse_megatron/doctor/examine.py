"""Makes all checks; whatever one of them raises, the others are made."""

import time
from collections.abc import Callable, Sequence

from zorse_megatron.doctor.check_list import Check
from zorse_megatron.doctor.finding import CheckResult, Finding, failed
from zorse_megatron.doctor.workshop import Workshop
from zorse_megatron.errors import ZorseError


def examine(
    workshop: Workshop, checks: Sequence[Check], tell: Callable[[CheckResult], None]
) -> list[CheckResult]:
    """Make the checks one after another, each within its time; `tell` gets each result."""
    results = []
    for check in checks:
        started_s = time.monotonic()
        workshop.allow(check.limit_s)
        result = CheckResult(
            name=check.name,
            title=check.title,
            finding=_made(check, workshop),
            duration_s=time.monotonic() - started_s,
        )
        tell(result)
        results.append(result)
    return results


def _made(check: Check, workshop: Workshop) -> Finding:
    try:
        return check.run(workshop)
    except ZorseError as error:
        return failed(str(error))
    except Exception as error:  # a file that a job should have left, a key that it should have
        return failed(f"{type(error).__name__}: {error}")
