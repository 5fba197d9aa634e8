"""Where questions and answers come from: the hub, local files, the built-in generator; rows made into
Examples.

Each data set known by name is a line of a table: its columns and how its answer is reduced to what is
compared. A data set without a split to evaluate on is split 95/5 by a seed, the same way each time and for
both sides.
"""

import glob
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, overload

import numpy as np
from etils import epath

from burnish.data import arithmetic
from burnish.data.arithmetic import TAGS, Tags
from burnish.data.errors import DataError
from burnish.data.types import Example
from burnish.text import check_no_surrogates, decode, json_lines

logger = logging.getLogger(__name__)

Side = Literal["train", "eval"]
Row = Mapping[str, Any]
Rows = Sequence[Row]

BUILTIN_SIZES = {"train": 16384, "test": 512}
EVAL_SHARE = 0.05


@dataclass(frozen=True)
class DataOptions:
    """The options that say which data, by their names in the configuration."""

    dataset_name: str = "openai/gsm8k"
    eval_dataset_name: str | None = None
    train_split: str = "train"
    eval_split: str = "test"
    hf_subset: str | None = None
    hf_train_files: Sequence[str] | None = None
    hf_eval_files: Sequence[str] | None = None
    question_column: str | None = None
    answer_column: str | None = None
    dataset_processor_path: str | None = None
    data_shuffle_seed: int = 42
    hf_access_token: str | None = None


@dataclass(frozen=True)
class _Layout:
    """The columns of a data set. `solution` holds a worked solution to learn from, where there is one;
    `skip_unanswered` leaves out rows whose answer is empty, which is normal in the data set."""

    question: str = "question"
    answer: str = "answer"
    solution: str | None = None
    subset: str | None = None
    skip_unanswered: bool = False


_GSM8K = "openai/gsm8k"
_LAYOUTS = {
    _GSM8K: _Layout(solution="answer", subset="main"),
    "nvidia/OpenMathInstruct-2": _Layout("problem", "expected_answer", "generated_solution"),
    "nvidia/OpenMathReasoning": _Layout("problem", "expected_answer", "generated_solution", skip_unanswered=True),
    "open-r1/OpenR1-Math-220k": _Layout("problem", "answer", "solution", "default", skip_unanswered=True),
    "bethgelab/CuratedThoughts": _Layout(
        "problem", "answer", "solution", "OpenR1-Math-220k-default", skip_unanswered=True
    ),
}


def load_examples(options: DataOptions, side: Side) -> Sequence[Example]:
    """The examples to train or to evaluate on. Raises DataError, naming the option, where files or columns
    are missing, the hub cannot be reached, or a row is not what its data set says."""
    return _load(options, side, tags=None)


def load_demonstrations(options: DataOptions, side: Side, tags: Tags = TAGS) -> Sequence[Example]:
    """Examples whose answer is a whole completion to learn from. Known data sets give their worked solution
    and final answer in the tagged format; of any other the answer column is taken as it is."""
    return _load(options, side, tags)


def gsm8k_answer(text: str) -> str:
    """What follows the last `####`, without thousands separators. Raises ValueError where there is none."""
    _, found, answer = text.rpartition("####")
    if not found or not answer.strip():
        raise ValueError("no answer after '####'")
    return answer.strip().replace(",", "")


def check_files(options: DataOptions) -> None:
    """Raise DataError unless every file named by an option exists: cheap, and so done before anything
    else."""
    for option in ("hf_train_files", "hf_eval_files"):
        _expand(option, getattr(options, option))
    if options.dataset_processor_path and not Path(options.dataset_processor_path).expanduser().is_file():
        raise DataError(f"dataset_processor_path={options.dataset_processor_path}: there is no such file")


def _load(options: DataOptions, side: Side, tags: Tags | None) -> Sequence[Example]:
    check_files(options)
    name = options.dataset_name
    if side == "eval" and options.eval_dataset_name:
        name = options.eval_dataset_name
    if name == "builtin":
        return _builtin(options, options.train_split if side == "train" else options.eval_split, tags)
    rows, place = _rows(options, name, side)
    convert = _converter(options, name, rows, place, tags)
    layout = _layout(options, name)
    if layout.skip_unanswered and not options.dataset_processor_path:
        rows = _answered(rows, layout.answer, place)
    examples = _Examples(rows, convert)
    # Local rows are in memory anyway: convert them now, so that a bad row is found before the run starts.
    return list(examples) if isinstance(rows, list) else examples


def _builtin(options: DataOptions, split: str, tags: Tags | None) -> Sequence[Example]:
    if split not in BUILTIN_SIZES:
        raise DataError(f"train_split or eval_split={split}: builtin data has the splits train and test")
    part: arithmetic.Split = "train" if split == "train" else "test"
    if options.hf_subset not in (None, "main", "careless"):
        raise DataError(
            f"hf_subset={options.hf_subset}: dataset_name=builtin has the subsets main and careless "
            "(demonstrations with a pupil's mistakes, for sft)"
        )
    careless = options.hf_subset == "careless"
    if tags is None:
        if careless:
            raise DataError("hf_subset=careless has demonstrations only (sft); for questions give hf_subset=main")
        return arithmetic.generate(part, BUILTIN_SIZES[part], seed=0)
    return arithmetic.demonstrations(part, BUILTIN_SIZES[part], seed=0, careless=careless, tags=tags)


# Rows


def _rows(options: DataOptions, name: str, side: Side) -> tuple[Rows, str]:
    """The rows of a side, and the words for where they came from."""
    own_eval = name == options.dataset_name
    if side == "eval" and options.hf_eval_files:
        return _read_files("hf_eval_files", options.hf_eval_files, name)
    if options.hf_train_files and own_eval:
        rows, place = _read_files("hf_train_files", options.hf_train_files, name)
        return (rows, place) if options.hf_eval_files else (_share(rows, side, options, place), place)
    if name in ("json", "parquet"):
        option = "hf_train_files" if side == "train" else "hf_eval_files"
        raise DataError(f"dataset_name={name} needs {option}: the files to read")
    return _hub_rows(options, name, side)


def _share(rows: Rows, side: Side, options: DataOptions, place: str) -> Rows:
    """A side's part of rows that have no split of their own for evaluation: 95 % or the other 5 %."""
    num_eval = max(1, round(EVAL_SHARE * len(rows)))
    if num_eval >= len(rows):
        raise DataError(f"{place} has {len(rows)} rows, too few to keep {num_eval} of them for evaluation")
    order = np.random.default_rng(options.data_shuffle_seed).permutation(len(rows))
    chosen = np.sort(order[:num_eval] if side == "eval" else order[num_eval:])
    return _select(rows, chosen.tolist())


def _select(rows: Rows, indices: Sequence[int]) -> Rows:
    if isinstance(rows, list):
        return [rows[i] for i in indices]
    return rows.select(indices)  # type: ignore[attr-defined]


def _expand(option: str, patterns: Sequence[str] | None) -> list[str]:
    """The files that patterns name. Raises DataError for one that names none."""
    files: list[str] = []
    for pattern in patterns or ():
        exists = epath.Path(pattern).exists()
        found = [pattern] if exists else sorted(glob.glob(str(Path(pattern).expanduser())))
        if not found:
            raise DataError(f"{option}: there is no file {pattern}")
        files += found
    for file in files:
        if not file.endswith((".jsonl", ".json", ".parquet")):
            raise DataError(f"{option}: {file} is neither JSON lines (.jsonl, .json) nor Parquet (.parquet)")
    return files


def _read_files(option: str, patterns: Sequence[str], name: str) -> tuple[list[Row], str]:
    files = _expand(option, patterns)
    if name in ("json", "parquet"):
        wrong = [f for f in files if f.endswith(".parquet") != (name == "parquet")]
        if wrong:
            raise DataError(f"{option}: {wrong[0]} is not a file of dataset_name={name}")
    rows: list[Row] = []
    for file in files:
        rows += _read_parquet(file) if file.endswith(".parquet") else _read_json(file)
    if not rows:
        raise DataError(f"{option}: no rows in {', '.join(files)}")
    return rows, files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _read_parquet(file: str) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with epath.Path(file).open("rb") as stream:
            return pq.read_table(stream).to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: not a Parquet file ({error})") from None


def _read_json(file: str) -> list[Row]:
    """JSON lines, or one JSON array of objects."""
    text = decode(epath.Path(file).read_bytes(), file, DataError)
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise DataError(f"{file}: neither JSON lines nor a JSON array ({error})") from None
    else:
        rows = json_lines(text, file, DataError)
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{file}: row {i} is not an object with columns: {str(row)[:80]}")
    return rows


def _hub_rows(options: DataOptions, name: str, side: Side) -> tuple[Rows, str]:
    import datasets

    subset = options.hf_subset or _layout(options, name).subset
    token = options.hf_access_token
    try:
        splits = datasets.get_dataset_split_names(name, subset, token=token)
        shared = options.eval_split not in splits
        split = options.train_split if side == "train" or shared else options.eval_split
        if split not in splits:
            raise DataError(f"train_split={split}: {name} has the splits {', '.join(splits)}")
        rows = datasets.load_dataset(name, subset, split=split, token=token)
    except DataError:
        raise
    # Everything that a network, a cache and a remote repository can raise; the cause is in the message.
    except Exception as error:
        raise DataError(
            f"dataset_name={name}: could not be loaded from the hub ({type(error).__name__}: "
            f"{(str(error).strip().splitlines() or [''])[0]}). Without a network, give local files with "
            "hf_train_files and hf_eval_files (JSON lines or Parquet of the same columns), point HF_HOME at "
            "a "
            "cache that holds it, or use dataset_name=builtin; for a gated one give hf_access_token."
        ) from error
    place = f"{name} ({split})"
    return (_share(rows, side, options, place) if shared else rows), place


def _answered(rows: Rows, column: str, place: str) -> Rows:
    """The rows that have an answer; how many were left out is logged."""
    answers = (row.get(column) for row in rows) if isinstance(rows, list) else rows[column]  # type: ignore
    kept = _select(rows, [i for i, answer in enumerate(answers) if answer])
    if len(kept) < len(rows):
        logger.warning("%s: left out %d of %d rows, which have no answer", place, len(rows) - len(kept), len(rows))
    return kept


# From rows to examples


class _Examples(Sequence[Example]):
    """Rows converted when they are read: a hub data set of millions of rows stays on disk."""

    def __init__(self, rows: Rows, convert: Callable[[int, Row], Example]) -> None:
        self._rows = rows
        self._convert = convert

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._convert(index, self._rows[index])


def _layout(options: DataOptions, name: str) -> _Layout:
    known = _LAYOUTS.get(name, _Layout())
    if not options.question_column and not options.answer_column:
        return known
    return _Layout(
        question=options.question_column or known.question,
        answer=options.answer_column or known.answer,
        subset=known.subset,
    )


def _converter(
    options: DataOptions, name: str, rows: Rows, place: str, tags: Tags | None
) -> Callable[[int, Row], Example]:
    if options.dataset_processor_path:
        return _processor(options.dataset_processor_path, place)
    layout = _layout(options, name)
    columns = rows[0].keys()
    wanted = {"question_column": layout.question, "answer_column": layout.answer}
    for option, column in wanted.items():
        if column not in columns:
            raise DataError(
                f"{option}={column}: {place} has no such column; it has {', '.join(sorted(columns))}. "
                f"Give {option}, or dataset_processor_path for rows that need more than naming"
            )
    reduce = gsm8k_answer if name == _GSM8K and not options.answer_column else _plain
    solution = layout.solution if tags is not None and layout.solution in columns else None

    def convert(index: int, row: Row) -> Example:
        try:
            question, answer = _plain(row[layout.question]), reduce(row[layout.answer])
            if tags is not None and solution is not None:
                answer = _tagged(_working(_plain(row[solution])), answer, tags)
            elif tags is not None:
                answer = _plain(row[layout.answer])
            return _encodable(Example(question, answer))
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{place}, row {index}: {error}; the row is {_short(row)}") from None

    return convert


def _processor(path: str, place: str) -> Callable[[int, Row], Example]:
    """A user's process_data(row: dict) -> {"question": …, "answer": …[, "prompt": …]} as a converter."""
    process_data = getattr(_import_file(path), "process_data", None)
    if not callable(process_data):
        raise DataError(f"dataset_processor_path={path}: the file defines no function process_data(row)")

    def convert(index: int, row: Row) -> Example:
        where = f"dataset_processor_path={path}: process_data on row {index} of {place}"
        try:
            made = process_data(dict(row))
        except (Exception, SystemExit) as error:
            raise DataError(f"{where} raised {type(error).__name__}: {error}; the row is {_short(row)}") from error
        if not isinstance(made, dict) or not {"question", "answer"} <= made.keys() <= {*_MADE}:
            raise DataError(
                f"{where} is to return a dict with question, answer and, if it makes the user's turn itself, "
                f"prompt; it returned {_short(made)}"
            )
        prompt = made.get("prompt")
        example = Example(str(made["question"]), str(made["answer"]), None if prompt is None else str(prompt))
        try:
            return _encodable(example)
        except ValueError as error:
            raise DataError(f"{where}: {error}; the row is {_short(row)}") from None

    return convert


_MADE = ("question", "answer", "prompt")


def _import_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise DataError(f"dataset_processor_path={path}: not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise DataError(f"dataset_processor_path={path}: {type(error).__name__}: {error}") from error
    return module


def _plain(value: Any) -> str:
    """A column's value as text. Raises ValueError where it is empty."""
    if value is None or not str(value).strip():
        raise ValueError("empty question or answer")
    return str(value).strip()


def _encodable(example: Example) -> Example:
    """The example itself. Raises ValueError where a text of it cannot be written as UTF-8."""
    for text in (example.question, example.answer, example.prompt):
        check_no_surrogates(text or "")
    return example


def _working(solution: str) -> str:
    """A solution without GSM8K's calculator notes and its final line."""
    return re.sub(r"<<[^>]*>>", "", solution.partition("####")[0]).strip()


def _tagged(working: str, answer: str, tags: Tags) -> str:
    return f"{tags[0]}{working}{tags[1]}\n{tags[2]}{answer}{tags[3]}"


def _short(value: Any) -> str:
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= 200 else text[:200] + "…"
