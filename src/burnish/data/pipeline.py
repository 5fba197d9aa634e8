"""From examples to batches of prompts: a Grain pipeline whose position can be saved and restored exactly.

Grain shuffles row numbers (anew each epoch, from one seed); a row is rendered when it is first read, and rows
whose prompt is too long are passed over. The order thus depends on the seed and the data alone, not on how
much of the data a run reads, and the state is a position in that order, with a fingerprint of the rows read:
a position in other data is refused. Batches run across epoch ends.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from burnish.data.errors import DataError
from burnish.data.templates import PromptTemplate
from burnish.data.tokenizer import RenderedPrompt, Tokenizer
from burnish.data.types import Example, Prompt

_RENDER_AT_ONCE = 1024


class PromptPipeline(Iterator[list[Prompt]]):
    """An iterator over batches of `batch_size` prompts.

    `limit` is how many prompts the run needs: data is read, in the run's order, until so many that fit are
    found, so that a run of 400 prompts does not tokenize a million rows. The counts `num_prompts` and
    `num_dropped` are those of the rows read. `limit=None` reads everything.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        template: PromptTemplate,
        tokenizer: Tokenizer,
        max_prompt_tokens: int,
        batch_size: int,
        seed: int,
        num_epochs: int = 1,
        *,
        shuffle: bool = True,
        train_fraction: float = 1.0,
        limit: int | None = None,
        drop_remainder: bool = True,
    ) -> None:
        """`train_fraction` keeps that share of the examples, drawn with the seed. `drop_remainder=False`
        yields a last batch that is not full (evaluation counts every prompt). Raises DataError where no batch
        can be made.
        """
        self._examples = examples
        self._template = template
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._rendered: dict[int, RenderedPrompt | None] = {}
        self._fingerprinted = (-1, "")  # of how many rows, and the hash

        rows = grain.MapDataset.range(len(examples))
        if train_fraction < 1.0:
            # Listed, because a slice of a shuffled MapDataset holds other rows in each epoch.
            shuffled = rows.shuffle(seed=seed)
            share = [int(shuffled[i]) for i in range(int(len(examples) * train_fraction))]
            rows = grain.MapDataset.source(share)
        if shuffle:
            rows = rows.shuffle(seed=seed)
        if len(rows) == 0:
            raise DataError(
                f"no training data: train_fraction={train_fraction} of {len(examples)} examples is none"
                if len(examples)
                else "no data: the data set is empty"
            )
        self._rows = rows
        self._num_read = self._read(rows, limit)
        self.num_dropped = sum(prompt is None for prompt in self._rendered.values())
        self.num_prompts = len(self._rendered) - self.num_dropped
        total = self.num_prompts * num_epochs
        self.num_batches = total // batch_size if drop_remainder else -(-total // batch_size)
        if self.num_batches == 0:
            raise DataError(self._too_little(max_prompt_tokens, batch_size, num_epochs))

        # One reading thread: rows are rendered once, in order, and the state needs no look-ahead to be exact.
        self._batches = iter(
            rows.repeat(num_epochs)
            .map(self._prompt)
            .filter(_fits)
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
            .batch(batch_size, drop_remainder=drop_remainder, batch_fn=list)
        )

    def __next__(self) -> list[Prompt]:
        return next(self._batches)

    def __iter__(self) -> "PromptPipeline":
        return self

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt among the rows read: no batch has a longer one."""
        return max(len(prompt.token_ids) for prompt in self._rendered.values() if prompt is not None)

    def state(self) -> dict[str, Any]:
        """The position, as JSON-able values. Taken between two batches, it says which batch comes next."""
        return {
            "position": self._batches.get_state(),
            "num_examples": len(self._examples),
            "num_read": self._num_read,
            "fingerprint": self._fingerprint(self._num_read),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position saved by a pipeline over the same data with the same seed and batch size. Raises DataError
        where the data are others than those the position was saved in."""
        now = len(self._examples)
        if now != state["num_examples"]:
            change = f"it has {now:,} rows, and had {state['num_examples']:,} when the checkpoint was saved"
        elif self._fingerprint(state["num_read"]) != state["fingerprint"]:
            change = f"its {now:,} rows have other questions or answers than when the checkpoint was saved"
        else:
            self._batches.set_state(state["position"])
            return
        raise DataError(
            f"the training data (dataset_name, train_split, hf_train_files) is not what the run was started with: "
            f"{change}. A position in it means nothing in other data: give the same data, or start a new run"
        )

    def _fingerprint(self, num_read: int) -> str:
        """Hash over the first rows of the order."""
        if self._fingerprinted[0] != num_read:
            digest = hashlib.blake2b(digest_size=16)
            for i in range(num_read):
                example = self._examples[int(self._rows[i])]
                digest.update(repr((example.question, example.answer, example.prompt)).encode())
            self._fingerprinted = (num_read, digest.hexdigest())
        return self._fingerprinted[1]

    def _read(self, rows: grain.MapDataset, limit: int | None) -> int:
        """Render rows in order until `limit` fit or all of one epoch are read; how many were read."""
        fitting = 0
        for start in range(0, len(rows), _RENDER_AT_ONCE):
            wanted = [int(rows[i]) for i in range(start, min(start + _RENDER_AT_ONCE, len(rows)))]
            self._render(wanted)
            fitting += sum(self._rendered[row] is not None for row in wanted)
            if limit is not None and fitting >= limit:
                return start + len(wanted)
        return len(rows)

    def _render(self, rows: list[int]) -> None:
        examples = [self._examples[row] for row in rows]
        texts = [
            self._template.render(example.question) if example.prompt is None else example.prompt
            for example in examples
        ]
        for row, rendered in zip(rows, self._tokenizer.render_prompts(texts), strict=True):
            self._rendered[row] = rendered if len(rendered.token_ids) <= self._max_prompt_tokens else None

    def _prompt(self, row: int | np.integer) -> Prompt | None:
        row = int(row)
        if row not in self._rendered:
            self._render([row])
        rendered = self._rendered[row]
        if rendered is None:
            return None
        example = self._examples[row]
        return Prompt(row, example.question, example.answer, rendered.text, rendered.token_ids)

    def _too_little(self, max_prompt_tokens: int, batch_size: int, num_epochs: int) -> str:
        if self.num_prompts == 0:
            return (
                f"no prompt fits: all {self.num_dropped} are longer than max_prefill_predict_length="
                f"{max_prompt_tokens} tokens"
            )
        return (
            f"batch_size={batch_size} is more than the {self.num_prompts} prompts × num_epoch={num_epochs} "
            f"that "
            f"there are ({self.num_dropped} were left out as longer than max_prefill_predict_length="
            f"{max_prompt_tokens} tokens)"
        )


def _fits(prompt: Prompt | None) -> bool:
    return prompt is not None
