"""Rollout files hold every field exactly and are whole or absent."""

import dataclasses

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.observe import files
from burnish.observe.rollouts import (
    SCHEMA,
    RolloutRow,
    drop_rollouts_after,
    read_rollouts,
    rollout_steps,
    rollouts_path,
    write_rollouts,
)


def make_row(step: int = 5, **changes: object) -> RolloutRow:
    row = RolloutRow(
        step=step,
        prompt_index=17,
        question="How many?",
        answer="42",
        prompt_ids=[1, 2, 3],
        completion_ids=[4, 5],
        completion="<answer>42</answer>",
        logprobs=[-0.5, -0.25],
        weight_versions=[4, 4],
        stop_reason="stop",
        seed=2**63 + 5,
        reward_parts={"answer": 1.0, "format": 0.1},
        reward=1.1,
        advantage=-0.7071,
        score_status="scored",
        correct=True,
        format_ok=False,
        extracted="42",
    )
    return dataclasses.replace(row, **changes)


def test_rows_come_back_equal(tmp_path):
    rows = [
        make_row(),
        make_row(logprobs=None, extracted=None, reward_parts={}, completion="ä\n\0€😀", prompt_ids=[]),
    ]
    path = write_rollouts(tmp_path, 5, rows)
    assert path == rollouts_path(tmp_path, 5)
    assert read_rollouts(tmp_path, 5) == rows


@settings(max_examples=25, deadline=None)
@given(text=st.text(), parts=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)))
def test_any_text_and_any_parts_come_back_equal(tmp_path_factory, text, parts):
    directory = tmp_path_factory.mktemp("rollouts")
    row = make_row(completion=text, question=text, reward_parts=parts)
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    write_rollouts(directory, 5, [row])
    assert read_rollouts(directory, 5) == [row]


def test_the_schema_has_the_fields_of_the_row():
    assert SCHEMA.names == [f.name for f in dataclasses.fields(RolloutRow)]


def test_other_readers_see_plain_columns(tmp_path):
    write_rollouts(tmp_path, 5, [make_row(), make_row(reward=0.0)])
    frame = pd.read_parquet(rollouts_path(tmp_path, 5))
    assert list(frame["reward"]) == [1.1, 0.0]
    assert list(frame["completion_ids"][0]) == [4, 5]
    assert pq.read_schema(rollouts_path(tmp_path, 5)).names == SCHEMA.names


def test_a_step_without_rows_has_a_file_too(tmp_path):
    write_rollouts(tmp_path, 5, [])
    assert read_rollouts(tmp_path, 5) == []


def test_a_step_done_again_replaces_its_file(tmp_path):
    write_rollouts(tmp_path, 5, [make_row(seed=1)])
    write_rollouts(tmp_path, 5, [make_row(seed=2)])
    assert [row.seed for row in read_rollouts(tmp_path, 5)] == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["step_000005.parquet"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fails(fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        write_rollouts(tmp_path, 5, [make_row()])
    assert list(tmp_path.iterdir()) == []


def test_resuming_drops_later_steps(tmp_path):
    for step in (1, 2, 10):
        write_rollouts(tmp_path, step, [make_row(step)])
    drop_rollouts_after(tmp_path, 2)
    assert rollout_steps(tmp_path) == [1, 2]
    drop_rollouts_after(tmp_path / "absent", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 4}, "a row of step 4 among the rollouts of step 5"),
        ({"logprobs": [-1.0]}, "differ in length"),
        ({"weight_versions": [1, 2, 3]}, "differ in length"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write_rollouts(tmp_path, 5, [make_row(**changes)])
    assert list(tmp_path.iterdir()) == []


def test_rollouts_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path, 1)
