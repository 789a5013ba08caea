"""How many examples each property is tried with.

Every run draws others, so few in each of many runs find what many in one run do. `make test` tries
half of what is written beside each property, and `ZORSE_TEST_EXAMPLES=1 make test` all of them:
before a release, and after a change of what draws them; a larger number tries more.
"""

import os

FACTOR = float(os.environ.get("ZORSE_TEST_EXAMPLES", "0.5"))


def examples(count: int) -> int:
    """`count` in a thorough run, fewer in others."""
    return max(1, round(count * FACTOR))
