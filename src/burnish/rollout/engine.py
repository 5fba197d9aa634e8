"""The built-in generation engine: continuous batching over a grid of prompts × completions.

Prompts are prefilled once, whatever the number of completions. A chunk of decode steps runs on the device in
one call; between chunks the host collects tokens, ends completions, refills slots, and fits the caches to
what is left. Nothing is kept from one `generate` to the next, so weights and cached keys can not disagree. On a mesh
every process runs the same schedule: what the host reads is the same everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from burnish.data.types import Prompt
from burnish.models.params import ParamInfo, Params, param_infos
from burnish.models.spec import ModelSpec
from burnish.parallel import rules
from burnish.parallel.mesh import on, single_device_mesh
from burnish.parallel.transfer import Transfer
from burnish.rollout import decode
from burnish.rollout.decode import CHUNK, Rows
from burnish.rollout.request import check_request
from burnish.rollout.sampling import cuts_from, uniforms
from burnish.rollout.schedule import Schedule, Slot, bucket
from burnish.rollout.stopping import stop_string_end
from burnish.rollout.types import Completion, Group, SamplingParams, StopReason

FIRST_COLUMNS = 64
"""A row's own cache starts with this many columns (fewer if it can not need them) and doubles when full."""

PREFILL_TOKENS = 512
"""Tokens of one prefill call: enough for matrix products to run at full speed."""


@dataclass
class _Draft:
    """A completion while it is being sampled."""

    slot: Slot
    seed: int
    limit: int
    uniforms: np.ndarray  # (limit,), one per token
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class BuiltinEngine:
    """`tokenizer_decode` turns token ids into text without special tokens. `max_slots` is the number of
    completions sampled side by side. `mesh` is what it runs on, by default one device, and `reshard_chunk_size`
    how many arrays are moved to it at once from other devices. Raises ValueError where a prompt or a limit is
    beyond what the engine was made for, and MeshError where the model can not be split over the mesh."""

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer_decode: Callable[[list[int]], str],
        *,
        max_slots: int,
        max_prompt_tokens: int,
        max_total_tokens: int,
        dtype: Any,
        mesh: Mesh | None = None,
        reshard_chunk_size: int | None = None,
    ) -> None:
        for name, value, least in (
            ("max_slots", max_slots, 1),
            ("max_prompt_tokens", max_prompt_tokens, 1),
            ("max_total_tokens", max_total_tokens, 2),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if max_total_tokens > spec.max_positions:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} is more than the model's {spec.max_positions} positions"
            )
        self._mesh = mesh or single_device_mesh()
        decode.check_fits(spec, self._mesh)
        self._reshard_chunk_size = reshard_chunk_size
        self._spec = spec
        self._decode_text = tokenizer_decode
        self._max_slots = max_slots
        self._max_prompt_tokens = max_prompt_tokens
        self._max_total_tokens = max_total_tokens
        self._dtype = jnp.dtype(dtype)
        self._view: Params | None = None
        self._version = -1
        # The same for every batch, whatever came before: nothing is compiled anew, and a resumed run's rounding is the
        # same as that of a run in one go.
        self._lane_columns = bucket(max_prompt_tokens - 1, 32, halves=True)
        self._compilations_before = decode.compilations.total()

    @property
    def num_compilations(self) -> int:
        """Compilations of device functions since this engine was made."""
        return decode.compilations.total() - self._compilations_before

    def load_weights(self, params: Params, version: int) -> Transfer | None:
        """See RolloutEngine. Copies the trainer's tree (stacked layers) into the decode view."""
        _check_tree(self._spec, params)
        self._view = None  # frees the old weights before the new ones are made
        view, report = decode.decode_view(
            self._spec, params, self._mesh, self._dtype, version, self._reshard_chunk_size
        )
        # Waits for the copy: NumPy arrays may be read in place, and the caller may change them on return.
        self._view = jax.block_until_ready(view)
        self._version = version
        return report

    def release_memory(self) -> None:
        """Nothing is kept between two calls of `generate` but the weights."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """See RolloutEngine. Completions come back in the order of their seeds."""
        if self._view is None:
            raise RuntimeError("generate was called before load_weights")
        check_request(prompts, seeds, sampling, self._spec.vocab_size, self._max_prompt_tokens, self._max_total_tokens)
        if not prompts:
            return []
        with on(self._mesh):
            done = self._sample(self._view, prompts, seeds, sampling, on_progress)
        return [
            Group(prompt, tuple(by_index[i] for i in range(len(by_index))))
            for prompt, by_index in zip(prompts, done, strict=True)
        ]

    def _sample(
        self,
        view: Params,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingParams,
        on_progress: Callable[[int, int], None] | None,
    ) -> list[dict[int, Completion]]:
        """The completions of each prompt, by their number."""
        run = _Run(
            self._spec, view, self._mesh, self._dtype, self._lane_columns, prompts, seeds, sampling, self._max_slots
        )
        done: list[dict[int, Completion]] = [{} for _ in prompts]
        tokens = finished = 0
        while drafts := run.advance():
            for draft, new in drafts:
                tokens += new
                completion = self._finish(draft, new, sampling)
                if completion is not None:
                    run.release(draft)
                    done[draft.slot.group][draft.slot.completion] = completion
                    finished += 1
            if on_progress is not None:
                on_progress(finished, tokens)
        return done

    def _finish(self, draft: _Draft, new: int, sampling: SamplingParams) -> Completion | None:
        """The completion, if the draft's last `new` tokens ended it."""
        ids, length, reason = draft.token_ids, len(draft.token_ids), None
        if not sampling.ignore_stop and ids[-1] in sampling.stop_token_ids:
            reason = StopReason.STOP
        elif length == draft.limit:
            reason = StopReason.LENGTH
        if sampling.stop_strings and not sampling.ignore_stop:
            end = stop_string_end(ids, length - new, sampling.stop_strings, self._decode_text)
            # A stop token and a stop string that end at the same token: the token is the more exact reason.
            if end is not None and not (reason is StopReason.STOP and end == length):
                length, reason = end, StopReason.STOP_STRING
        if reason is None:
            return None
        return Completion(
            token_ids=np.array(ids[:length], np.int32),
            logprobs=np.array(draft.logprobs[:length], np.float32),
            weight_versions=np.full(length, self._version, np.int32),
            stop_reason=reason,
            text=self._decode_text(ids[:length]),
            seed=draft.seed,
        )


class _Run:
    """One `generate`: the device's caches and the host's copy of the rows' state."""

    def __init__(
        self,
        spec: ModelSpec,
        view: Params,
        mesh: Mesh,
        dtype: Any,
        lane_columns: int,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingParams,
        max_slots: int,
    ) -> None:
        self._spec, self._view, self._dtype = spec, view, dtype
        self._prompts, self._seeds, self._sampling = prompts, seeds, sampling
        self._shards = rules.ways("batch", mesh.shape)
        self._schedule = Schedule([len(s) for s in seeds], max_slots, self._shards)
        num_rows = len(self._schedule.slots)
        longest = sampling.max_total_tokens - min(len(p.token_ids) for p in prompts)
        self._columns = min(FIRST_COLUMNS, bucket(longest, 16))
        self._column = 0
        self._lanes = decode.empty_caches(spec, self._schedule.num_lanes, lane_columns, dtype, mesh)
        self._own = decode.empty_caches(spec, num_rows, self._columns, dtype, mesh)
        self._lane_lengths = np.zeros(self._schedule.num_lanes, np.int32)
        zeros = np.zeros(num_rows, np.int32)
        self._rows = Rows(zeros, zeros.copy(), zeros.copy(), zeros.astype(bool), zeros.copy())
        self._drafts: dict[Slot, _Draft] = {}
        stop_ids = () if sampling.ignore_stop else sampling.stop_token_ids
        self._stop_ids = np.full(bucket(len(stop_ids), 8), -1, np.int32)
        self._stop_ids[: len(stop_ids)] = stop_ids
        self._cuts, self._way = cuts_from(sampling, spec.vocab_size)

    def advance(self) -> list[tuple[_Draft, int]]:
        """Refill, sample a chunk, and return each sampled draft with its number of new tokens; [] when all is
        done."""
        self._refill()
        self._cut()
        active = self._schedule.active
        if not active:
            return []
        oldest = int(self._rows.ages[active].max())
        if oldest == self._columns:
            of_shard = np.arange(len(self._schedule.slots) // self._shards)
            self._relocate(np.tile(of_shard, self._shards), 2 * self._columns)
        steps = min(CHUNK, int(self._rows.remaining[active].max()), self._columns - oldest)
        chunk, self._own = decode.decode_chunk(
            self._spec, self._view, self._lanes, self._lane_lengths, self._own, self._rows, self._uniforms(active),
            np.int32(self._column), np.int32(steps), self._stop_ids, self._cuts, self._way, dtype=self._dtype,
        )  # fmt: skip
        return self._collect(active, jax.device_get(chunk))

    def _uniforms(self, active: list[int]) -> np.ndarray:
        numbers = np.zeros((len(self._schedule.slots), CHUNK), np.float32)
        for row in active:
            draft = self._draft_in(row)
            ahead = draft.uniforms[len(draft.token_ids) :][:CHUNK]
            numbers[row, : len(ahead)] = ahead
        return numbers

    def _draft_in(self, row: int) -> _Draft:
        slot = self._schedule.slots[row]
        assert slot is not None
        return self._drafts[slot]

    def release(self, draft: _Draft) -> None:
        """Free the slot of a finished draft."""
        row = self._schedule.slots.index(draft.slot)
        self._schedule.release(row)
        self._rows.active[row] = False
        del self._drafts[draft.slot]

    def _collect(self, active: list[int], chunk: decode.Chunk) -> list[tuple[_Draft, int]]:
        self._column = (self._column + int(chunk.steps)) % self._columns
        sampled = []
        for row in active:
            draft, new = self._draft_in(row), int(chunk.emitted[row])
            draft.token_ids += chunk.tokens[row, :new].tolist()
            draft.logprobs += chunk.logprobs[row, :new].tolist()
            self._rows.tokens[row] = draft.token_ids[-1]
            self._rows.positions[row] += new
            self._rows.ages[row] += new
            self._rows.remaining[row] -= new
            sampled.append((draft, new))
        return sampled

    def _refill(self) -> None:
        admission = self._schedule.admit()
        self._prefill(admission.lanes)
        for row, slot in admission.rows:
            prompt = self._prompts[slot.group].token_ids
            seed = self._seeds[slot.group][slot.completion]
            limit = self._sampling.max_total_tokens - len(prompt)
            self._drafts[slot] = _Draft(slot, seed, limit, uniforms(seed, limit))
            start = Rows(prompt[-1], len(prompt) - 1, 0, True, limit)
            for values, value in zip(self._rows, start, strict=True):
                values[row] = value

    def _prefill(self, lanes: Sequence[tuple[int, int]]) -> None:
        """Prefill the prompts that are new in `lanes` [(lane, group)], those of like length together. Each shard
        computes the prompts of its own lanes."""
        lanes_a_shard = self._schedule.num_lanes // self._shards
        lanes_of: list[dict[int, list[int]]] = [{} for _ in range(self._shards)]  # by shard and group
        for lane, group in lanes:
            lanes_of[lane // lanes_a_shard].setdefault(group, []).append(lane)
            self._lane_lengths[lane] = len(self._prompts[group].token_ids) - 1
        by_columns: dict[int, list[list[int]]] = {}  # groups by shard
        for shard, groups in enumerate(lanes_of):
            for group in groups:
                length = len(self._prompts[group].token_ids) - 1
                if length:
                    columns = bucket(length, 32, halves=True)
                    by_columns.setdefault(columns, [[] for _ in range(self._shards)])[shard].append(group)
        for columns, waiting in sorted(by_columns.items()):
            full = max(1, PREFILL_TOKENS // columns)
            while most := max(map(len, waiting)):
                # Two sizes, so two compilations: a full call, or single prompts where it would be half empty.
                size = full if 2 * most >= full else 1
                self._prefill_batch([groups[:size] for groups in waiting], lanes_of, size, columns)
                waiting = [groups[size:] for groups in waiting]

    def _prefill_batch(
        self, groups: Sequence[Sequence[int]], lanes_of: Sequence[dict[int, list[int]]], size: int, columns: int
    ) -> None:
        """Prefill up to `size` groups in each shard."""
        rows = self._shards * size
        tokens, lengths = np.zeros((rows, columns), np.int32), np.zeros(rows, np.int32)
        sources = np.full(self._schedule.num_lanes, -1, np.int32)
        for shard, of_shard in enumerate(groups):
            for i, group in enumerate(of_shard):
                prefix = self._prompts[group].token_ids[:-1]
                row = shard * size + i
                tokens[row, : len(prefix)], lengths[row] = prefix, len(prefix)
                sources[lanes_of[shard][group]] = i
        caches = decode.prefill(self._spec, self._view, tokens, lengths, dtype=self._dtype)
        self._lanes = [decode.insert(*pair, sources) for pair in zip(self._lanes, caches, strict=True)]

    def _cut(self) -> None:
        cut = self._schedule.cut()
        if cut is None:
            return
        lanes, rows, zero = np.array(cut.lanes), np.array(cut.rows), np.int32(0)
        lanes_before, rows_before = (len(x) // self._shards for x in (self._lane_lengths, self._rows.ages))
        lane_columns = self._lanes[0].k.shape[3]
        self._lanes = [decode.relocate(c, lanes, zero, columns=lane_columns) for c in self._lanes]
        shard = np.arange(len(rows)) // (len(rows) // self._shards)
        self._lane_lengths = self._lane_lengths[lanes + shard * lanes_before]
        self._rows = Rows(*(values[rows + shard * rows_before] for values in self._rows))
        self._rows.active[:] = [slot is not None for slot in self._schedule.slots]
        self._relocate(rows, self._columns)

    def _relocate(self, rows: np.ndarray, columns: int) -> None:
        """Move rows' own caches, and unroll the ring: what was the oldest column becomes column 0."""
        shift = np.int32(self._column)
        self._own = [decode.relocate(c, rows, shift, columns=columns) for c in self._own]
        self._column = self._columns % columns
        self._columns = columns


def _check_tree(spec: ModelSpec, params: Params) -> None:
    """Every array that the spec names is there with its shape, and no other."""
    expected = _by_path(param_infos(spec))
    found = _by_path(params)
    for path in sorted(expected.keys() ^ found.keys()):
        raise ValueError(f"weights: {path} is {'missing' if path in expected else 'not part of this model'}")
    for path, info in expected.items():
        if tuple(found[path].shape) != info.shape:
            raise ValueError(f"weights: {path} has shape {tuple(found[path].shape)}, expected {info.shape}")


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, ParamInfo))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
