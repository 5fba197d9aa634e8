"""Fill dense rows with prompts and completions, so that nothing is computed on padding and no prompt twice.

A segment is a prompt (branch 0) followed by its completions (branches 1..), each of which sees the prompt and
itself; decoder.forward states the rule. Segments are spread evenly over the fewest rows that hold them, and the
row length is rounded up to one of a few buckets (four per octave), so that few shapes are ever compiled. A group
that does not fit in a row is split and its prompt repeated, and so is one where rows of a micro-batch, which devices
share, would be empty; a single completion is never split.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burnish.rl.types import Denominators, PackedBatch, PackedStep
from burnish.rollout.types import Group


@dataclass(frozen=True)
class TrainedCompletion:
    """One completion to be trained."""

    token_ids: np.ndarray  # (C,) int32
    sampler_logprobs: np.ndarray  # (C,) float32
    advantage: float


@dataclass(frozen=True)
class Segment:
    """A prompt and those of its completions that share one copy of it."""

    prompt: np.ndarray  # (P,) int32
    completions: tuple[TrainedCompletion, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(c.token_ids) for c in self.completions)


def bucket(n: int) -> int:
    """The smallest offered row length that holds n tokens: 64, 80, 96, 112, 128, 160, ... (at most 25 % more)."""
    step = max(16, 1 << max(0, (n - 1).bit_length() - 3))
    return max(64, -(-n // step) * step)


def pack(
    groups: Sequence[Group],
    advantages: np.ndarray,
    valid: np.ndarray,
    *,
    max_tokens: int,
    max_groups: int | None = None,
    rows: int = 1,
    keep_zero_advantages: bool = False,
) -> PackedStep:
    """Pack the completions of one step.

    advantages, valid: (P, G). Completions that are not valid are left out and do not count in the denominators.
    Completions with advantage 0 have no gradient unless there is a KL penalty: they count in the denominators, and
    are put into rows only with `keep_zero_advantages`. A row holds at most `max_tokens` tokens (more only when one
    prompt with one completion is longer) and a micro-batch of `rows` rows at most `max_groups` prompts.
    """
    valid = np.asarray(valid, bool)
    segments: list[Segment] = []
    num_valid = num_tokens = num_zero = 0
    for group, group_advantages, group_valid in zip(groups, advantages, valid, strict=True):
        kept = []
        for completion, advantage, ok in zip(group.completions, group_advantages, group_valid, strict=True):
            if not ok:
                continue
            num_valid += 1
            num_tokens += len(completion.token_ids)
            if advantage == 0 and not keep_zero_advantages:
                num_zero += 1
                continue
            kept.append(TrainedCompletion(completion.token_ids, completion.logprobs, float(advantage)))
        if kept:
            segments.append(Segment(np.asarray(group.prompt.token_ids, np.int32), tuple(kept)))
    return pack_segments(
        segments,
        sequences=num_valid,
        tokens=num_tokens,
        max_tokens=max_tokens,
        max_groups=max_groups,
        rows=rows,
        num_zero_advantage=num_zero,
        num_invalid=int((~valid).sum()),
    )


def pack_examples(
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_tokens: int,
    max_groups: int | None = None,
    rows: int = 1,
) -> PackedStep:
    """Pack (prompt ids, completion ids) pairs for supervised training: every completion token counts once. Rows and
    micro-batches are filled as `pack` fills them; an example is a group of one."""
    segments = [
        Segment(
            np.asarray(prompt, np.int32),
            (TrainedCompletion(np.asarray(completion, np.int32), np.zeros(len(completion), np.float32), 1.0),),
        )
        for prompt, completion in examples
    ]
    return pack_segments(
        segments,
        sequences=len(segments),
        tokens=sum(len(completion) for _, completion in examples),
        max_tokens=max_tokens,
        max_groups=max_groups,
        rows=rows,
    )


def pack_segments(
    segments: Sequence[Segment],
    *,
    sequences: int,
    tokens: int,
    max_tokens: int,
    max_groups: int | None = None,
    rows: int = 1,
    num_zero_advantage: int = 0,
    num_invalid: int = 0,
) -> PackedStep:
    """Place segments in rows; `sequences` and `tokens` are the step's counts, left-out completions included."""
    for segment in segments:
        if len(segment.prompt) == 0 or any(len(c.token_ids) == 0 for c in segment.completions):
            raise ValueError("a prompt and each of its completions need at least one token to be trained on")
    capacity = max([max_tokens, *(len(s.prompt) + len(c.token_ids) for s in segments for c in s.completions)])
    pieces = [piece for segment in segments for piece in _split(segment, capacity)]
    placed = _assign(pieces, capacity, rows, max_groups)
    length = bucket(max((sum(p.num_tokens for p in row) for row in placed), default=0))
    micro_batches = tuple(_build(placed[i : i + rows], length) for i in range(0, len(placed), rows))
    pieces = [piece for row in placed for piece in row]
    trained = sum(len(c.token_ids) for p in pieces for c in p.completions)
    return PackedStep(
        micro_batches=micro_batches,
        denominators=Denominators(float(max(sequences, 1)), float(max(tokens, 1)), float(max(trained, 1))),
        num_sequences=sum(len(p.completions) for p in pieces),
        num_zero_advantage=num_zero_advantage,
        num_invalid=num_invalid,
        row_tokens=sum(p.num_tokens for p in pieces),
        padded_tokens=length * len(placed),
    )


def _split(segment: Segment, capacity: int) -> list[Segment]:
    """The segment, or several that repeat its prompt where it is longer than a row."""
    pieces: list[Segment] = []
    taken: list[TrainedCompletion] = []
    size = len(segment.prompt)
    for completion in segment.completions:
        if taken and size + len(completion.token_ids) > capacity:
            pieces.append(Segment(segment.prompt, tuple(taken)))
            taken, size = [], len(segment.prompt)
        taken.append(completion)
        size += len(completion.token_ids)
    pieces.append(Segment(segment.prompt, tuple(taken)))
    return pieces


def _assign(pieces: list[Segment], capacity: int, rows: int, max_groups: int | None) -> list[list[Segment]]:
    """Longest first into the emptiest row, with the number of rows that wastes least after bucketing.

    Evenly filled rows share one bucket; the number of rows is a multiple of `rows`.
    """
    if not pieces:
        return []
    best: list[list[Segment]] | None = None
    best_size = 0
    fewest = _fewest(pieces, capacity, rows, max_groups)
    for micro_batches in range(fewest, fewest + 3):
        placed = _spread(pieces, micro_batches * rows, capacity, rows, max_groups)
        if placed is None:  # more rows do not always help
            continue
        placed = [row for i in range(0, len(placed), rows) for row in _fill_empty(placed[i : i + rows])]
        size = len(placed) * bucket(max(sum(p.num_tokens for p in row) for row in placed))
        if best is None or size < best_size:
            best, best_size = placed, size
    assert best is not None
    return best


def _fewest(pieces: list[Segment], capacity: int, rows: int, max_groups: int | None) -> int:
    """Micro-batches of `rows` rows that the pieces can be spread over, and not over one less."""
    sizes = np.array([p.num_tokens for p in pieces])
    # A row has room for k pieces longer than 1 / (k + 1) of it.
    of_pieces = max(-(-int((sizes * (k + 1) > capacity).sum()) // k) for k in range(1, 9))
    least = max(-(-int(sizes.sum()) // (capacity * rows)), -(-of_pieces // rows))
    if max_groups is not None:
        least = max(least, -(-len(pieces) // max_groups))

    def enough(micro_batches: int) -> bool:
        return _spread(pieces, micro_batches * rows, capacity, rows, max_groups) is not None

    step, too_few = 1, least - 1
    while not enough(too_few + step):
        too_few += step
        step *= 2
    most = too_few + step
    while most - too_few > 1:
        middle = (too_few + most) // 2
        if enough(middle):
            most = middle
        else:
            too_few = middle
    return most


def _spread(
    pieces: list[Segment], n: int, capacity: int, rows: int, max_groups: int | None
) -> list[list[Segment]] | None:
    """Pieces over n rows, the longest first into the emptiest, of equals the first; None if one does not fit."""
    placed: list[list[Segment]] = [[] for _ in range(n)]
    groups = [0] * (n // rows)
    emptiest = [(0, row) for row in range(n)]
    for piece in sorted(pieces, key=lambda p: -p.num_tokens):
        # A micro-batch that has all its groups gets no more: its rows are never asked again.
        while emptiest and max_groups is not None and groups[emptiest[0][1] // rows] >= max_groups:
            heapq.heappop(emptiest)
        if not emptiest or emptiest[0][0] + piece.num_tokens > capacity:
            return None
        load, row = emptiest[0]
        placed[row].append(piece)
        heapq.heapreplace(emptiest, (load + piece.num_tokens, row))
        groups[row // rows] += 1
    return placed


def _fill_empty(rows: list[list[Segment]]) -> list[list[Segment]]:
    """The rows of a micro-batch, where some are empty (there are fewer prompts than devices) with halves of the longest
    segments in them: a prompt is read twice, and the longest row, for which all wait, is shorter."""
    rows = [list(row) for row in rows]
    while empty := [row for row in rows if not row]:
        whole = [row for row in rows if len(row) == 1 and len(row[0].completions) > 1]
        if not whole:
            break
        row = max(whole, key=lambda row: row[0].num_tokens)
        completions = sorted(row[0].completions, key=lambda c: -len(c.token_ids))
        row[0], half = (Segment(row[0].prompt, tuple(completions[i::2])) for i in (0, 1))
        empty[0].append(half)
    return rows


def _build(rows: list[list[Segment]], length: int) -> PackedBatch:
    """The arrays of one micro-batch."""
    B = len(rows)
    ints = {
        name: np.zeros((B, length), np.int32)
        for name in ("tokens", "positions", "segments", "branches", "source", "targets", "sequences")
    }
    floats = {name: np.zeros((B, length), np.float32) for name in ("lengths", "advantages", "sampler_logprobs")}
    trained = np.zeros((B, length), bool)
    sequence = 0
    count = 0
    for b, row in enumerate(rows):
        at = listed = 0
        for s, segment in enumerate(row, start=1):
            P = len(segment.prompt)
            prompt_at = slice(at, at + P)
            ints["tokens"][b, prompt_at] = segment.prompt
            ints["positions"][b, prompt_at] = np.arange(P)
            ints["segments"][b, prompt_at] = s
            last_of_prompt = at + P - 1
            at += P
            for branch, completion in enumerate(segment.completions, start=1):
                C = len(completion.token_ids)
                tokens_at, list_at = slice(at, at + C), slice(listed, listed + C)
                ints["tokens"][b, tokens_at] = completion.token_ids
                ints["positions"][b, tokens_at] = P + np.arange(C)
                ints["segments"][b, tokens_at] = s
                ints["branches"][b, tokens_at] = branch
                ints["source"][b, list_at] = np.concatenate([[last_of_prompt], np.arange(at, at + C - 1)])
                ints["targets"][b, list_at] = completion.token_ids
                ints["sequences"][b, list_at] = sequence
                floats["lengths"][b, list_at] = C
                floats["advantages"][b, list_at] = completion.advantage
                floats["sampler_logprobs"][b, list_at] = completion.sampler_logprobs
                trained[b, list_at] = True
                sequence += 1
                at += C
                listed += C
        count = max(count, listed)
    return PackedBatch(trained=trained, count=np.int32(count), **ints, **floats)  # type: ignore[arg-type]
