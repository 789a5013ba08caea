from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.plan.spans import gaps, overlaps, spans_of, spell

SPANS = st.lists(st.tuples(st.integers(-4, 12), st.integers(-4, 12)))


def numbers(spans):
    return [number for span in spans for number in range(*span)]


def is_tidy(spans):
    """Sorted, none empty, no two that touch."""
    ends = [end for span in spans for end in span]
    return ends == sorted(set(ends))


@given(SPANS, st.integers(0, 12))
def test_gaps_are_the_numbers_in_no_span(spans, stop):
    covered = set(numbers(spans))
    found = gaps(spans, stop)
    assert numbers(found) == [number for number in range(stop) if number not in covered]
    assert is_tidy(found)


@given(SPANS)
def test_overlaps_are_the_numbers_in_two_spans_or_more(spans):
    covered = numbers(spans)
    found = overlaps(spans)
    assert numbers(found) == sorted({n for n in covered if covered.count(n) > 1})
    assert is_tidy(found)


@given(st.lists(st.integers(-9, 9)))
def test_spans_of_covers_exactly_the_numbers(wanted):
    found = spans_of(wanted)
    assert numbers(found) == sorted(set(wanted))
    assert is_tidy(found)


def test_spell_includes_both_ends():
    assert spell([(0, 1), (3, 6)]) == "0, 3 to 5"


def test_absurd_sizes_are_not_enumerated():
    assert gaps([(5, 7)], 10**18) == [(0, 5), (7, 10**18)]
