"""What the data room hands on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One row of a data set: the question as asked and the gold answer, already reduced to what is compared.

    In supervised fine-tuning `answer` is the whole completion to learn. `prompt` is set only by a user's
    process_data: the text of the user's turn, in place of the template's.
    """

    question: str
    answer: str
    prompt: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A rendered question. `token_ids` is exactly what the model reads; nothing downstream re-encodes
    `text`."""

    index: int  # row number in the data set it came from
    question: str
    answer: str
    text: str
    token_ids: tuple[int, ...]
