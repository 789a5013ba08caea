"""Optimizer state in the host that is stepped in pieces smaller than most parameters.

For entries: `ZORSE_TEST_PIECE` is the number of elements of a piece, if it is set.
"""

import os

from zorse_megatron.schedule import shards

NAME = "ZORSE_TEST_PIECE"


def use_small_pieces() -> None:
    """Do as the environment says, in this process."""
    if NAME in os.environ:
        shards.STATE_PIECE_ELEMENTS = int(os.environ[NAME])
