"""Rows into examples: each data set's columns, files instead of the hub, the 95/5 split, errors that name
things."""

import gzip
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data.errors import DataError
from burnish.data.sources import DataOptions, gsm8k_answer, load_demonstrations, load_examples

GSM8K_ROW = {"question": "How many?", "answer": "It is 1000+234=<<1000+234=1234>>1234.\n#### 1,234"}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def numbered(n):
    return [{"question": f"What is {i}?", "answer": str(i)} for i in range(n)]


def files(train, test=None, name="json", **options):
    return DataOptions(
        dataset_name=name, hf_train_files=[train], hf_eval_files=None if test is None else [test], **options
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [("a\n#### 42", "42"), ("#### 1\n#### 1,234 ", "1234"), ("####-7", "-7"), ("x #### 3.50", "3.50")],
)
def test_a_gsm8k_answer_is_what_follows_the_marker_without_commas(text, answer):
    assert gsm8k_answer(text) == answer


@pytest.mark.parametrize("text", ["42", "working ####", "#### \n"])
def test_a_gsm8k_answer_without_a_marker_is_an_error(text):
    with pytest.raises(ValueError, match="####"):
        gsm8k_answer(text)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_gsm8k_is_read_from_files(tmp_path, write):
    suffix = "jsonl" if write is jsonl else "parquet"
    path = write(tmp_path / f"rows.{suffix}", [GSM8K_ROW])
    (example,) = load_examples(files(path, path, name="openai/gsm8k"), "train")
    assert (example.question, example.answer) == ("How many?", "1234")


def test_a_gsm8k_row_without_an_answer_names_file_and_row(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [GSM8K_ROW, {"question": "q", "answer": "none"}])
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: no answer after '####'"):
        load_examples(files(path, path, name="openai/gsm8k"), "train")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("nvidia/OpenMathInstruct-2", {"problem": "p", "expected_answer": "1/2", "generated_solution": "s"}),
        ("nvidia/OpenMathReasoning", {"problem": "p", "expected_answer": "1/2", "generated_solution": "s"}),
        ("open-r1/OpenR1-Math-220k", {"problem": "p", "answer": "1/2", "solution": "s"}),
        ("bethgelab/CuratedThoughts", {"problem": "p", "answer": "1/2", "solution": "s"}),
    ],
)
def test_known_data_sets_have_their_columns(tmp_path, name, row):
    path = jsonl(tmp_path / "rows.jsonl", [row])
    options = files(path, path, name=name)
    (example,) = load_examples(options, "train")
    assert (example.question, example.answer) == ("p", "1/2")
    (demonstration,) = load_demonstrations(options, "train")
    assert demonstration.answer == "<reasoning>s</reasoning>\n<answer>1/2</answer>"


def test_rows_without_an_answer_are_left_out_where_that_is_normal(tmp_path, caplog):
    rows = [{"problem": "p", "expected_answer": a} for a in ("1", "", None, "2")]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    examples = load_examples(files(path, path, name="nvidia/OpenMathReasoning"), "train")
    assert [e.answer for e in examples] == ["1", "2"]
    assert "left out 2 of 4 rows" in caplog.text
    with pytest.raises(DataError, match="row 1: empty"):
        load_examples(files(path, path, question_column="problem", answer_column="expected_answer"), "train")


def test_a_generic_source_has_named_columns(tmp_path):
    path = jsonl(tmp_path / "rows.json", [{"q": "one?", "a": 1, "other": None}])
    options = files(path, path, question_column="q", answer_column="a")
    (example,) = load_examples(options, "train")
    assert (example.question, example.answer) == ("one?", "1")


def test_a_json_array_is_read_like_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(numbered(3)), encoding="utf-8")
    assert [e.answer for e in load_examples(files(str(path), str(path)), "train")] == ["0", "1", "2"]


def test_a_missing_column_is_an_error_that_names_those_there_are(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "label": "1"}])
    with pytest.raises(DataError, match="question_column=question") as error:
        load_examples(files(path, path), "train")
    assert "label, prompt" in str(error.value)
    with pytest.raises(DataError, match="answer_column=target"):
        load_examples(files(path, path, question_column="prompt", answer_column="target"), "train")


@pytest.mark.parametrize("option", ["hf_train_files", "hf_eval_files"])
def test_a_missing_file_is_an_error_whichever_side_is_loaded(tmp_path, option):
    path = jsonl(tmp_path / "rows.jsonl", numbered(3))
    options = replace(files(path, path), **{option: [str(tmp_path / "absent.jsonl")]})
    for side in ("train", "eval"):
        with pytest.raises(DataError, match=rf"{option}: there is no file .*absent\.jsonl"):
            load_examples(options, side)


def test_files_of_another_kind_are_errors(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", numbered(3))
    with pytest.raises(DataError, match="not a file of dataset_name=parquet"):
        load_examples(files(path, path, name="parquet"), "train")
    csv = tmp_path / "rows.csv"
    csv.write_text("question,answer\n", encoding="utf-8")
    with pytest.raises(DataError, match="neither JSON lines"):
        load_examples(files(str(csv)), "train")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": \n', encoding="utf-8")
    with pytest.raises(DataError, match="broken"):
        load_examples(files(str(broken)), "train")


def test_a_line_that_is_not_json_is_named_by_its_number(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "q", "answer": "1"}\n\n{"question": }\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"broken\.jsonl, line 3, column 14: not JSON"):
        load_examples(files(str(broken)), "train")


@pytest.mark.parametrize(
    ("data", "byte"), [('{"question": "caf\u00e9"}'.encode("latin-1"), 17), (gzip.compress(b"{}", mtime=0), 1)]
)
def test_a_file_that_is_not_utf8_is_an_error_that_says_where(tmp_path, data, byte):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"rows\.jsonl: not UTF-8 text, byte {byte} is 0x"):
        load_examples(files(str(path)), "train")


@pytest.mark.parametrize("column", ["question", "answer"])
def test_half_a_character_is_an_error_that_names_the_row(tmp_path, column):
    path = jsonl(tmp_path / "rows.jsonl", [*numbered(1), {**numbered(1)[0], column: "1 \ud800"}])
    with pytest.raises(DataError, match=r"row 1: character 2 is the lone surrogate U\+D800") as error:
        load_examples(files(path, path), "train")
    str(error.value).encode("utf-8")


def test_a_pattern_names_several_files(tmp_path):
    for i in range(3):
        jsonl(tmp_path / f"part-{i}.jsonl", [numbered(3)[i]])
    pattern = str(tmp_path / "part-*.jsonl")
    assert [e.answer for e in load_examples(files(pattern, pattern), "train")] == ["0", "1", "2"]


def test_data_without_an_evaluation_split_is_split_95_to_5_the_same_way_each_time(tmp_path):
    options = files(jsonl(tmp_path / "rows.jsonl", numbered(200)))
    train, held_out = (load_examples(options, side) for side in ("train", "eval"))
    assert (len(train), len(held_out)) == (190, 10)
    assert {e.answer for e in train} | {e.answer for e in held_out} == {str(i) for i in range(200)}
    assert load_examples(options, "eval") == held_out
    assert load_examples(replace(options, data_shuffle_seed=1), "eval") != held_out
    with pytest.raises(DataError, match="too few"):
        load_examples(files(jsonl(tmp_path / "one.jsonl", numbered(1))), "train")


def test_another_data_set_may_evaluate(tmp_path):
    options = files(jsonl(tmp_path / "rows.jsonl", numbered(20)), eval_dataset_name="builtin")
    assert len(load_examples(options, "eval")) == 512


def test_the_builtin_data_has_a_careless_pupil_for_sft_only():
    options = DataOptions("builtin")
    assert load_examples(options, "eval")[0].answer.isdigit()
    careless = replace(options, hf_subset="careless")
    right, sloppy = (load_demonstrations(o, "train") for o in (options, careless))
    assert right != sloppy
    with pytest.raises(DataError, match="careless"):
        load_examples(careless, "train")
    with pytest.raises(DataError, match="hf_subset=hard"):
        load_examples(replace(options, hf_subset="hard"), "train")


# A processor of the user's


def processor(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(body, encoding="utf-8")
    return str(path)


def test_process_data_makes_question_answer_and_prompt(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"a": 2, "b": 3}])
    code = "def process_data(row):\n    return {'question': '{a}+{b}'.format(**row), 'answer': row['a'] + row['b']}"
    (example,) = load_examples(files(path, path, dataset_processor_path=processor(tmp_path, code)), "train")
    assert (example.question, example.answer, example.prompt) == ("2+3", "5", None)
    code = "def process_data(row):\n    return {'question': 'q', 'answer': '1', 'prompt': 'Say 1.'}"
    (example,) = load_examples(files(path, path, dataset_processor_path=processor(tmp_path, code)), "train")
    assert example.prompt == "Say 1."


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "defines no function process_data"),
        ("import sys\nsys.exit(3)", "mine.py: SystemExit: 3"),
        ("import sys\ndef process_data(row): sys.exit(3)", "raised SystemExit: 3"),
        ("def process_data(row): return {'question': chr(0xd800), 'answer': '1'}", "lone surrogate"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("def process_data(row):\n    return row['nope']", "row 0 of .* raised KeyError"),
        ("def process_data(row):\n    return {'question': 'q'}", "is to return a dict"),
        (
            "def process_data(row):\n    return {'question': 'q', 'answer': 'a', 'answr': ''}",
            "is to return a dict",
        ),
    ],
)
def test_a_failing_processor_is_an_error_that_names_file_and_row(tmp_path, code, message):
    path = jsonl(tmp_path / "rows.jsonl", numbered(1))
    options = files(path, path, dataset_processor_path=processor(tmp_path, code))
    with pytest.raises(DataError, match=message) as error:
        load_examples(options, "train")
    assert "mine.py" in str(error.value)


# The hub, played by a local stand-in


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, {"name": {split: rows}}; records what was asked of it."""
    asked = []

    def make(name, splits):
        def names(asked_name, subset=None, token=None):
            assert asked_name == name
            return list(splits)

        def load(asked_name, subset=None, split=None, token=None):
            asked.append((asked_name, subset, split, token))
            return datasets.Dataset.from_list(splits[split])

        monkeypatch.setattr(datasets, "get_dataset_split_names", names)
        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return make


def test_gsm8k_comes_from_the_hub_with_its_subset_and_token(hub):
    asked = hub("openai/gsm8k", {"train": [GSM8K_ROW] * 3, "test": [GSM8K_ROW]})
    options = DataOptions(hf_access_token="secret")
    assert [e.answer for e in load_examples(options, "train")] == ["1234"] * 3
    assert [e.answer for e in load_examples(options, "eval")] == ["1234"]
    assert asked == [("openai/gsm8k", "main", split, "secret") for split in ("train", "test")]


def test_a_hub_data_set_without_a_test_split_is_split_95_to_5(hub):
    rows = [{"problem": f"p{i}", "expected_answer": str(i), "generated_solution": ""} for i in range(100)]
    hub("nvidia/OpenMathInstruct-2", {"train": rows, "train_1M": rows[:40]})
    options = DataOptions("nvidia/OpenMathInstruct-2")
    train, held_out = ([e.answer for e in load_examples(options, side)] for side in ("train", "eval"))
    assert (len(train), len(held_out)) == (95, 5)
    assert set(train) | set(held_out) == {str(i) for i in range(100)}
    assert len(load_examples(replace(options, train_split="train_1M"), "train")) == 38


def test_unanswered_rows_of_the_hub_are_left_out(hub):
    rows = [{"problem": f"p{i}", "answer": "" if i % 2 else str(i)} for i in range(10)]
    hub("open-r1/OpenR1-Math-220k", {"train": rows, "test": rows})
    examples = load_examples(DataOptions("open-r1/OpenR1-Math-220k"), "train")
    assert [e.answer for e in examples] == ["0", "2", "4", "6", "8"]


def test_an_unknown_split_names_those_there_are(hub):
    hub("nvidia/OpenMathReasoning", {"cot": [], "tir": []})
    with pytest.raises(DataError, match="train_split=train: nvidia/OpenMathReasoning has the splits cot, tir"):
        load_examples(DataOptions("nvidia/OpenMathReasoning"), "train")


def test_an_unreachable_hub_is_an_error_that_says_what_to_do(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    with pytest.raises(DataError, match="no route to host") as error:
        load_examples(DataOptions(), "train")
    assert all(word in str(error.value) for word in ("hf_train_files", "HF_HOME", "builtin"))


def test_local_files_need_no_hub_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    path = jsonl(tmp_path / "rows.jsonl", numbered(3))
    assert len(load_examples(files(path, path), "train")) == 3


def test_the_published_gsm8k_files_are_read_whole():
    root = Path(__file__).parents[2]
    directory = Path(os.environ.get("BURNISH_GSM8K", root.parent / "shared" / "data" / "gsm8k"))
    if not (directory / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K files in {directory} (set BURNISH_GSM8K to a directory with train and test.jsonl)")
    options = DataOptions(
        hf_train_files=[str(directory / "train.jsonl")], hf_eval_files=[str(directory / "test.jsonl")]
    )
    train, test = (load_examples(options, side) for side in ("train", "eval"))
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0].answer == "72"
    assert all(float(e.answer) == float(e.answer) for e in [*train, *test])
