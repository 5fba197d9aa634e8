"""Lines of a log that is read again and again come once each."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.launch.gke.logs import LineFilter, parse_stamp


def stamp(nanoseconds: int) -> str:
    """As Kubernetes writes it: without zeros at the end of the fraction."""
    fraction = f".{nanoseconds:09d}".rstrip("0").rstrip(".")
    return f"2026-01-01T00:00:00{fraction}Z"


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_each_line_comes_once_however_the_readings_are_cut(data: st.DataObject, steps: list[int]) -> None:
    times = [99_999_990 + sum(steps[: index + 1]) for index in range(len(steps))]
    log = [f"{stamp(time)} line {index}" for index, time in enumerate(times)]
    seen, shown, read = LineFilter(), [], 0
    for _ in range(data.draw(st.integers(0, 4))):
        # A reading begins at or before the first line with the time of the last one seen, and is cut anywhere.
        begin = data.draw(st.integers(0, times.index(times[read - 1]))) if read else 0
        end = data.draw(st.integers(begin, len(log)))
        seen.begin()
        shown += [seen.take(line) for line in log[begin:end]]
        read = max(read, end)
    seen.begin()
    shown += [seen.take(line) for line in log]
    assert [text for text in shown if text is not None] == [f"line {index}" for index in range(len(log))]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-30T19:11:16Z", (datetime(2026, 11, 30, 19, 11, 16, tzinfo=UTC), 0)),
        ("2026-11-30T19:11:16.5Z", (datetime(2026, 11, 30, 19, 11, 16, tzinfo=UTC), 500_000_000)),
        ("2026-11-30T20:11:16.000000001+01:00", (datetime(2026, 11, 30, 19, 11, 16, tzinfo=UTC), 1)),
        ("failed", None),
        ("", None),
    ],
)
def test_a_stamp_is_read_to_the_nanosecond(text: str, moment: object) -> None:
    assert parse_stamp(text) == moment


def test_a_line_without_a_time_is_shown_as_it_is() -> None:
    assert LineFilter().take("unable to retrieve container logs") == "unable to retrieve container logs"


def test_an_empty_line_is_a_line() -> None:
    seen = LineFilter()
    assert seen.take(f"{stamp(1)} ") == ""
    assert seen.take(f"{stamp(1)} ") == ""
