"""Where a stop string completes, against trying every length."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.rollout.stopping import stop_string_end

PIECES = ["", "a", "b", "ab", "</", "ba</", ">", "a>b"]  # token borders fall inside stop strings


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    st.lists(st.sampled_from(["ab", "</a>", "aa", "b<", ">"]), min_size=1, max_size=3),
)
def test_the_end_is_the_least_length_with_a_stop_string(tokens: list[int], stops: list[str]) -> None:
    ends = [n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops)]
    expected = ends[0] if ends else None
    clean = ends[0] - 1 if ends else len(tokens)
    for checked in {0, clean // 2, max(0, clean - 1)}:
        assert stop_string_end(tokens, checked, stops, decode) == expected
