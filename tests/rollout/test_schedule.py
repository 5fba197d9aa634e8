"""Slots, lanes and batch sizes: plain Python, checked by simulation."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rollout.schedule import MIN_ROWS, Schedule, bucket


def test_buckets_are_few_and_never_too_small() -> None:
    assert [bucket(n, 8) for n in (0, 1, 8, 9, 17, 64)] == [8, 8, 8, 16, 32, 64]
    assert [bucket(n, 1, halves=True) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    for halves in (False, True):
        for size in range(1, 500):
            assert size <= bucket(size, 4, halves) < max(5, 2 * size)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 11), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(0, 2**16),
    st.sampled_from([1, 2, 3, 8]),
)
def test_every_completion_runs_once_in_a_lane_of_its_prompt(
    sizes: list[int], max_slots: int, seed: int, shards: int
) -> None:
    rng = random.Random(seed)
    schedule = Schedule(sizes, max_slots, shards)
    assert len(schedule.slots) <= max(max_slots, shards)
    assert schedule.num_lanes % shards == 0
    lane_group: dict[int, int] = {}
    started: list[tuple[int, int]] = []
    finished = 0
    for _ in range(10_000):
        admission = schedule.admit()
        for lane, group in admission.lanes:
            rows = range(lane * schedule.width, (lane + 1) * schedule.width)
            assert all(row in [r for r, _ in admission.rows] for row in schedule.active if row in rows)
            lane_group[lane] = group
        for row, slot in admission.rows:
            assert lane_group[row // schedule.width] == slot.group
            started.append((slot.group, slot.completion))
        assert schedule.active or not schedule.waiting
        before = [schedule.slots[row] for row in schedule.active]
        width, of_shard = schedule.width, len(schedule.slots) // shards
        shard_of = {schedule.slots[row]: row // of_shard for row in schedule.active}
        if cut := schedule.cut():
            assert not schedule.waiting
            assert [schedule.slots[row] for row in schedule.active] == before
            assert all(lane == row // width for lane, row in zip(cut.lanes, cut.rows, strict=True))
            assert len(cut.rows) == len(schedule.slots) == schedule.num_lanes
            assert len(cut.rows) >= MIN_ROWS * shards
            assert max(cut.rows) < of_shard
            now = len(schedule.slots) // shards
            assert {schedule.slots[row]: row // now for row in schedule.active} == shard_of, "no row leaves its shard"
            origin = [lane + i // now * (of_shard // width) for i, lane in enumerate(cut.lanes)]
            lane_group = {new: lane_group[old] for new, old in enumerate(origin) if old in lane_group}
        if not schedule.active:
            break
        for row in schedule.active:
            if rng.random() < 0.3:
                schedule.release(row)
                finished += 1
    assert sorted(started) == [(g, c) for g, size in enumerate(sizes) for c in range(size)]
    assert finished == len(started)


def test_all_completions_start_at_once_where_they_fit() -> None:
    schedule = Schedule([4] * 8, 32)
    assert (schedule.num_lanes, schedule.width) == (8, 4)
    assert len(schedule.admit().rows) == 32


def test_a_large_group_takes_several_lanes() -> None:
    schedule = Schedule([16, 16], 32)
    assert (schedule.num_lanes, schedule.width) == (4, 8)
    admission = schedule.admit()
    assert sorted(group for _, group in admission.lanes) == [0, 0, 1, 1]
    assert len(admission.rows) == 32


def test_a_freed_slot_goes_to_the_same_prompt_first() -> None:
    schedule = Schedule([4, 4, 4], 4)
    schedule.admit()
    assert schedule.slots[0] is not None
    group = schedule.slots[0].group
    schedule.release(0)
    (row, slot), *_ = schedule.admit().rows
    assert (row, slot.group) == (0, group)


def test_the_batch_is_cut_when_few_are_left_and_nothing_waits() -> None:
    schedule = Schedule([4] * 8, 32)
    schedule.admit()
    for row in range(20):
        schedule.release(row)
    cut = schedule.cut()
    assert cut is not None
    assert cut.rows[:12] == tuple(range(20, 32))
    assert len(cut.rows) == 16
    assert schedule.cut() is None


def test_every_shard_gets_its_part_of_few_completions() -> None:
    for sizes, max_slots in (([8], 8), ([4, 4, 4, 4], 16), ([4] * 32, 16)):
        schedule = Schedule(sizes, max_slots, shards=4)
        schedule.admit()
        of_shard = len(schedule.slots) // 4
        held = [sum(row // of_shard == shard for row in schedule.active) for shard in range(4)]
        assert min(held) == max(held) > 0, sizes
