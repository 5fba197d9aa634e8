"""`generate` and `chat`: prompts in, completions out, the same for the same seed."""

import json
import os
import subprocess
import sys

import pytest
from tiny_runs import TOKEN

from burnish.config.overrides import load_config
from burnish.config.schema import GenerateConfig
from burnish.data.templates import PromptTemplate
from burnish.data.tokenizer import load_tokenizer
from burnish.errors import BurnishError
from burnish.rl.generate_command import generate

LENGTHS = ("max_prefill_predict_length=72", "max_target_length=96", "dtype=float32")


@pytest.fixture
def run(checkpoint):
    """run(*options): generate with the tiny checkpoint."""
    return lambda *options: generate(
        load_config(GenerateConfig, [f"load_parameters_path={checkpoint}", *LENGTHS, *options])
    )


@pytest.fixture
def completed(run, tmp_path):
    """completed(*options): the records of the output file."""

    def completed(*options):
        run(f"output_file={tmp_path / 'out.jsonl'}", *options)
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]

    return completed


def texts(records):
    return [completion["text"] for record in records for completion in record["completions"]]


def test_the_same_seed_gives_the_same_texts_and_another_gives_others(completed):
    ask = ["prompt=How many?", "num_completions=3"]
    first, again, other = completed(*ask), completed(*ask), completed(*ask, "seed=1")
    assert first == again
    assert len(set(texts(first))) == 3
    assert not set(texts(first)) & set(texts(other))


def test_a_completion_does_not_depend_on_what_else_is_asked(completed, tmp_path):
    alone = completed("prompt=How many?")
    file = tmp_path / "prompts.txt"
    file.write_text("How many?\n\nWhat is 1 + 2?\nWhat is 3 * 4?\n")
    together = completed(f"prompts_file={file}", "max_num_seqs=2")
    assert [record["question"] for record in together] == ["How many?", "What is 1 + 2?", "What is 3 * 4?"]
    assert together[0] == alone[0]


def test_a_record_says_how_each_completion_ended(completed):
    (record,) = completed("prompt=How many?", "num_completions=8")
    prompt_tokens = 96 - max(c["tokens"] for c in record["completions"])
    for completion in record["completions"]:
        assert completion["stop_reason"] in ("stop", "length")
        assert (completion["stop_reason"] == "length") == (completion["tokens"] == 96 - prompt_tokens)
    assert len({c["seed"] for c in record["completions"]}) == 8


def test_a_prompt_is_a_user_turn_or_passed_as_it_is(completed, checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    question = "How many?"
    (chat,) = completed(f"prompt={question}")
    (plain,) = completed(f"prompt={question}", "chat=false")
    (templated,) = completed(f"prompt={question}", "data_template_path=gsm8k_rl.json")
    assert chat["prompt"] == tokenizer.render_prompt(question).text
    assert plain["prompt"] == question
    assert templated["prompt"] == tokenizer.render_prompt(PromptTemplate.load("gsm8k_rl.json").render(question)).text


def test_prompts_of_jsonl_are_its_questions(completed, questions):
    records = completed(f"prompts_file={questions}", "decode_sampling_temperature=0")
    asked = [json.loads(line)["question"] for line in questions.read_text().splitlines()]
    assert [record["question"] for record in records] == asked


def test_completions_go_to_the_terminal_without_an_output_file(run, completed, capsys):
    (expected,) = texts(completed("prompt=How many?"))
    capsys.readouterr()
    run("prompt=How many?")
    assert letters(capsys.readouterr().out) == letters(expected)


def letters(text):
    """Without blanks and control characters, which a terminal shows in its own way."""
    return "".join(c for c in text if c.isalnum())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "needs prompt=.* or prompts_file="),
        (["prompts_file=/nowhere"], "prompts_file=/nowhere: there is no such file"),
        (["prompt=" + "How many? " * 100], r"prompt 1 has \d+ tokens; .*max_prefill_predict_length=72"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(run, options, said):
    with pytest.raises(BurnishError, match=said):
        run(*options)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"caf\xe9", "not UTF-8 text, byte 3 is 0xe9"),
        ("p.jsonl", b'{"question": "q"}\n\n{"question": \n', "line 3, column 14: not JSON"),
        ("p.jsonl", b'{"question": 7}', "row 0: expected a JSON object whose field question is a text"),
        ("p.jsonl", b"[]", "row 0: expected a JSON object whose field question is a text"),
        ("p.jsonl", b'{"question": "\\ud800"}', r"row 0: character 0 is the lone surrogate U\+D800"),
    ],
)
def test_a_prompts_file_that_cannot_be_read_is_an_error_that_says_where(run, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BurnishError, match=said):
        run(f"prompts_file={tmp_path / name}")


def test_an_output_file_that_cannot_be_written_is_found_before_the_model_is_read(tmp_path):
    (tmp_path / "file").write_text("")
    for place, said in (("file/x.jsonl", "its directory cannot be made"), ("", "is a directory")):
        options = ["load_parameters_path=/nowhere", "prompt=q", f"output_file={tmp_path / place}"]
        with pytest.raises(BurnishError, match=f"output_file=.*{said}"):
            generate(load_config(GenerateConfig, options))


def test_a_chat_goes_on_in_context_until_an_empty_line(checkpoint, completed):
    """Greedy, and a stop string that occurs early, so that two exchanges fit; the others push out the oldest ones."""
    tokenizer, greedy = load_tokenizer(checkpoint), "decode_sampling_temperature=0"
    (answer,) = texts(completed("prompt=How many?", greedy))
    stop = f"stop_strings=[{json.dumps(next(c for c in answer[4:] if c.isalpha() and c.isascii()))}]"
    (first,) = texts(completed("prompt=How many?", greedy, stop))
    turns = [("user", "How many?"), ("assistant", first), ("user", "What is [b]?")]
    (rendered,) = tokenizer.render_chats([[{"role": role, "content": text} for role, text in turns]])
    (second,) = texts(completed(f"prompt={rendered.text}", "chat=false", greedy, stop))

    said = ["How many?", "What is [b]?", *["What is 1 + 2?"] * 8, "How many? " * 100, "", "never read"]
    options = [f"load_parameters_path={checkpoint}", *LENGTHS, greedy, stop]
    chat = subprocess.run(
        [sys.executable, "-m", "burnish.cli.main", "chat", *options],
        input="\n".join(said),
        env={**os.environ, "HF_TOKEN": TOKEN, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert chat.returncode == 0, chat.stderr
    *turns, too_long, end = chat.stdout.split("you: ")[1:]
    answers = [letters(turn.removeprefix("model:")) for turn in turns]
    assert len(answers) == 10
    assert answers[:2] == [letters(first), letters(second)]
    assert "more than max_prefill_predict_length=72" in too_long
    assert end == ""
    assert TOKEN not in chat.stdout + chat.stderr
