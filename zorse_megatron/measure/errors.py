"""Errors of measuring a cluster."""

from zorse_megatron.errors import ZorseError


class MeasureError(ZorseError):
    """The cluster cannot be measured, or not as it was asked for."""

    def __reduce__(self) -> tuple[object, ...]:
        """Ranks hand errors to each other; by default the message alone would be handed on."""
        return type(self), (self.title, self.problems)
