"""The emulated cluster's time, as the runtime reads a device's."""

from zorse_megatron.emulate.clock.rank_clock import RankClock


class EmulatedTime:
    """A counterpart of `trace.HostClock`."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock

    def mark(self) -> float:
        """Return the rank's time."""
        return self._clock.now_s

    def has_come(self, mark: float) -> bool:
        """It has."""
        return True

    def seconds(self, mark: float) -> float:
        """Return the time that was noted."""
        return mark
