import time

import numpy as np
import pytest
import tiny_rl
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rl.packing import Segment, TrainedCompletion, _fewest, _spread, bucket, pack, pack_examples


def trained_sequences(packed):
    """Every trained completion as (prompt ids, completion ids, advantage), read back from the rows alone."""
    found = []
    for batch in packed.micro_batches:
        for b in range(batch.tokens.shape[0]):
            for s in sorted(set(batch.sequences[b][batch.trained[b]].tolist())):
                mine = batch.trained[b] & (batch.sequences[b] == s)
                first = batch.source[b][mine][0]
                segment = batch.segments[b, first]
                prompt = batch.tokens[b][(batch.segments[b] == segment) & (batch.branches[b] == 0)]
                assert set(batch.lengths[b][mine].tolist()) == {float(mine.sum())}
                found.append(
                    (tuple(prompt), tuple(batch.targets[b][mine]), round(float(batch.advantages[b][mine][0]), 5))
                )
    return sorted(found)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.integers(1, 6),
    generations=st.integers(2, 5),
    seed=st.integers(0, 99),
    max_tokens=st.integers(16, 300),
    rows=st.integers(1, 3),
    max_groups=st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_completion_is_trained_once_whatever_the_rows(prompts, generations, seed, max_tokens, rows, max_groups):
    rollouts = tiny_rl.groups(prompts, generations, seed)
    rng = np.random.default_rng(seed)
    advantages, valid = rng.normal(size=(prompts, generations)), rng.random((prompts, generations)) < 0.8
    packed = pack(rollouts, advantages, valid, max_tokens=max_tokens, rows=rows, max_groups=max_groups)
    expected = sorted(
        (g.prompt.token_ids, tuple(c.token_ids.tolist()), round(float(np.float32(a)), 5))
        for g, row, oks in zip(rollouts, advantages, valid, strict=True)
        for c, a, ok in zip(g.completions, row, oks, strict=True)
        if ok
    )
    assert trained_sequences(packed) == expected
    longest = max(len(g.prompt.token_ids) + len(c.token_ids) for g in rollouts for c in g.completions)
    for batch in packed.micro_batches:
        assert batch.tokens.shape == packed.micro_batches[0].tokens.shape
        assert (batch.segments > 0).sum(axis=1).max() <= max(max_tokens, longest)


def spread_by_trying_every_row(lengths, n, capacity, rows, max_groups):
    """For each piece, the longest first, the row it goes to by the rule; None if one has none."""
    loads, groups, chosen = [0] * n, [0] * (n // rows), {}
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        open_rows = [
            row
            for row in range(n)
            if loads[row] + lengths[piece] <= capacity and (max_groups is None or groups[row // rows] < max_groups)
        ]
        if not open_rows:
            return None
        chosen[piece] = row = min(open_rows, key=lambda row: (loads[row], row))
        loads[row] += lengths[piece]
        groups[row // rows] += 1
    return chosen


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    micro_batches=st.integers(1, 8),
    capacity=st.integers(60, 150),
    rows=st.integers(1, 4),
    max_groups=st.one_of(st.none(), st.integers(1, 12)),
)
def test_pieces_go_to_the_emptiest_row_that_may_have_them(lengths, micro_batches, capacity, rows, max_groups):
    pieces = [
        Segment(np.array([i]), (TrainedCompletion(np.zeros(n - 1, np.int32), np.zeros(n - 1, np.float32), 1.0),))
        for i, n in enumerate(lengths)
    ]

    def expected(n):
        return spread_by_trying_every_row(lengths, n, capacity, rows, max_groups)

    placed = _spread(pieces, micro_batches * rows, capacity, rows, max_groups)
    chosen = expected(micro_batches * rows)
    assert (placed is None) == (chosen is None)
    if placed is not None:
        assert {int(p.prompt[0]): row for row, held in enumerate(placed) for p in held} == chosen
    fewest = _fewest(pieces, capacity, rows, max_groups)
    assert expected(fewest * rows) is not None
    assert fewest == 1 or expected((fewest - 1) * rows) is None


def test_thousands_of_completions_are_packed_in_seconds():
    rng = np.random.default_rng(0)
    pieces = [([1] * 100, [2] * int(n)) for n in rng.integers(50, 900, 8192)]
    start = time.process_time()
    packed = pack_examples(pieces, max_tokens=2048, max_groups=64, rows=16)
    assert time.process_time() - start < 10  # going through all rows for every piece takes minutes
    assert packed.num_sequences == 8192


def test_a_prompt_is_in_a_row_once_for_all_its_completions():
    rollouts = tiny_rl.groups(2, 4)
    packed = pack(rollouts, np.ones((2, 4)), np.ones((2, 4), bool), max_tokens=512)
    assert packed.row_tokens == sum(
        len(g.prompt.token_ids) + sum(len(c.token_ids) for c in g.completions) for g in rollouts
    )


def test_the_stop_token_is_trained_even_when_it_equals_the_pad_id():
    rollouts = [tiny_rl.Group(tiny_rl.Prompt(0, "", "", "", (5, 6)), (tiny_rl.completion([7, 8, 0]),) * 2)]
    packed = pack(rollouts, np.array([[1.0, -1.0]]), np.ones((1, 2), bool), max_tokens=64)
    assert trained_sequences(packed) == [((5, 6), (7, 8, 0), -1.0), ((5, 6), (7, 8, 0), 1.0)]


def test_positions_of_each_completion_continue_from_the_prompt():
    rollouts = [tiny_rl.Group(tiny_rl.Prompt(0, "", "", "", (5, 6)), (tiny_rl.completion([7, 8, 9]),) * 2)]
    batch = pack(rollouts, np.ones((1, 2)), np.ones((1, 2), bool), max_tokens=64).micro_batches[0]
    assert batch.positions[0, :8].tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert batch.branches[0, :8].tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.source[0, :6].tolist() == [1, 2, 3, 1, 5, 6]


def test_completions_without_advantage_are_left_out_but_counted():
    rollouts = tiny_rl.groups(3, 2)
    advantages = np.array([[0.0, 0.0], [1.0, -1.0], [1.0, 0.0]])
    valid = np.array([[True, True], [True, True], [True, False]])
    packed = pack(rollouts, advantages, valid, max_tokens=512)
    assert (packed.num_sequences, packed.num_zero_advantage, packed.num_invalid) == (3, 2, 1)
    lengths = np.array([[len(c.token_ids) for c in g.completions] for g in rollouts])
    assert packed.denominators.sequences == 5
    assert packed.denominators.tokens == lengths[valid].sum()
    assert packed.denominators.trained_tokens == lengths[valid & (advantages != 0)].sum()
    assert pack(rollouts, advantages, valid, max_tokens=512, keep_zero_advantages=True).num_sequences == 5


def test_buckets_are_few_and_waste_at_most_a_quarter():
    sizes = [bucket(n) for n in range(64, 8193)]
    assert len(set(sizes)) == 29
    assert all(n <= b <= 1.25 * n for n, b in zip(range(64, 8193), sizes, strict=True))


def test_supervised_examples_train_completions_only():
    packed = pack_examples([([1, 2, 3], [4, 5]), ([6], [7, 8, 9])], max_tokens=64)
    assert trained_sequences(packed) == [((1, 2, 3), (4, 5), 1.0), ((6,), (7, 8, 9), 1.0)]
    with pytest.raises(ValueError, match="at least one token"):
        pack_examples([([1], [])], max_tokens=64)
