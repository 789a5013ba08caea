"""Counts with their nouns."""


def number_of(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun in the right form.

    >>> number_of(1, "layer"), number_of(12000, "layer"), number_of(2, "series", "series")
    ('1 layer', '12000 layers', '2 series')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
