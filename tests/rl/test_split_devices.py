"""Runs on 8 virtual devices whose sampler has four of its own: on policy nothing changes, one step ahead the run is
that of a plain loop, and a run that was cut goes on as it would have."""

from pathlib import Path

import pytest
from tiny_rl import SPEC
from virtual_devices import FLAGS, found_by

from burnish.models.params import num_params

pytestmark = pytest.mark.slow


PROGRAM = Path(__file__).with_name("split_devices.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by(PROGRAM, tmp_path_factory.mktemp("split"), 8, FLAGS)


def test_on_policy_it_does_not_matter_whose_devices_they_are(found):
    shared, split = found["shared"], found["split"]
    assert split["ids"] == shared["ids"]
    for a, b in zip(split["metrics"], shared["metrics"], strict=True):
        for name in ("reward/mean", "grad_norm", "entropy", "weights_changed"):
            assert a[name] == pytest.approx(b[name], rel=1e-5)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["logprob_difference/max"] < 1e-4


def test_one_step_ahead_the_run_is_that_of_a_plain_loop(found):
    """Batch s is sampled by the weights after s - 2 updates, and weighted by what s - 1 make of it."""
    ahead, plain = found["ahead"], found["plain"]
    assert ahead["ids"] == [step["ids"] for step in plain]
    assert ahead["versions"] == [[0], [0], [1], [2]]
    names = {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "off_policy/weight": "importance_weight",
        "off_policy/truncated": "importance_truncated",
    }
    for row, step in zip(ahead["metrics"], plain, strict=True):
        for name, in_loop in names.items():
            assert row[name] == pytest.approx(step[in_loop], rel=1e-5, abs=1e-6), name
    assert [row["off_policy/steps"] for row in ahead["metrics"]] == [0, 1, 1, 1]
    assert ahead["metrics"][0]["off_policy/weight"] == pytest.approx(1, abs=1e-5)
    assert all(0 < row["off_policy/truncated"] < 1 for row in ahead["metrics"][1:])


def test_a_run_that_was_cut_has_its_completions_in_flight_in_the_checkpoint(found):
    """Killed, and stopped by a signal; the program itself compares the runs, bit for bit."""
    assert found["resumed"]
    assert found["stopped"]["code"] == 75
    assert "step 2 is saved" in found["stopped"]["said"]
    assert found["stopped"]["steps"] == [2]


def test_every_array_is_moved_once_and_said(found):
    """20 arrays: nine of each of two layers, embeddings and last norm."""
    moved = found["transfer"]
    assert (moved["arrays"], moved["bytes"]) == (20, 2 * num_params(SPEC))  # bfloat16
    assert moved["said"] == "Reshard finished: weights of version 7, N arrays, N GB in N s (N GB/s)"
    assert found["log"].count("Reshard finished: weights of version 1, 20 arrays") >= 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lost", ["layers/1/q_proj did not arrive"]),
        ("extra", ["layers/9/q_proj was not sent"]),
        ("swapped", ["layers/0/gate_proj is not what was sent"]),
        ("turned", ["final_norm is not what was sent"]),
    ],
)
def test_an_array_that_is_not_what_was_sent_is_named(found, fault, words):
    message = found["faults"][fault]
    assert all(word in message for word in words), message
    assert "version 7" in message


def test_a_slice_of_32_under_one_controller_is_two_devices(found, tmp_path):
    """16 devices train a mixture of experts (2 × 4 × 2), 16 sample (4 × 4): the layout of a slice under Pathways."""
    slice_, one_each = found_by(PROGRAM, tmp_path, 32, FLAGS), found["experts"]
    assert "Devices: 16 train (fsdp 2 × expert 4 × tensor 2), 16 sample while the others train" in slice_["log"]
    assert slice_["ids"] == one_each["ids"]
    for a, b in zip(slice_["metrics"], one_each["metrics"], strict=True):
        for name in ("grad_norm", "entropy", "off_policy/weight", *(name for name in b if name.startswith("experts/"))):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
