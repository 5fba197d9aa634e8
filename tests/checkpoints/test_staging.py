"""Where conversions write: whole or not at all, by one process at a time."""

import os
import subprocess
import sys
import textwrap

import pytest
from exports import raw_tensors
from llama_variants import BASE, random_tensors, write_checkpoint
from rich.console import Console

from burnish.checkpoints.convert_commands import convert, to_maxtext
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.staging import staged
from burnish.config.schema import ConvertConfig, ExportConfig, ToMaxTextConfig

HOLD = """
    import sys, time
    from pathlib import Path
    from burnish.checkpoints.staging import staged
    with staged(Path(sys.argv[1]), 1) as partial:
        (partial / "file").write_text("first")
        print("holding", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that is writing `out`; a line to its stdin ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "holding\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_the_first_one_undisturbed(holder, tmp_path):
    with pytest.raises(CheckpointError, match="is being written by another process"), staged(tmp_path / "out", 1):
        pass
    with staged(tmp_path / "elsewhere", 1):
        pass
    holder.communicate("\n")
    assert (tmp_path / "out" / "file").read_text() == "first"
    with pytest.raises(CheckpointError, match="not empty"), staged(tmp_path / "out", 1):
        pass


def test_what_a_killed_process_left_is_removed(holder, tmp_path):
    holder.kill()
    holder.communicate()
    (left,) = tmp_path.iterdir()
    with staged(tmp_path / "out", 1):
        assert not left.exists()


def test_two_conversions_to_one_place_at_once(tmp_path):
    """One is done, the other one refused, whichever it is."""
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    command = [sys.executable, "-m", "burnish.cli.main", "convert", str(source), str(tmp_path / "out"), "--to", "hf"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1]
    (refused,) = [error for error in errors if error]
    assert "is being written by another process" in refused or "exists and is not empty" in refused
    assert raw_tensors(tmp_path / "out") == raw_tensors(source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_an_empty_or_absent_directory_stays_a_link(there, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if there:
        (disk / "real").mkdir()
    (tmp_path / "out").symlink_to(disk / "real")
    with staged(tmp_path / "out", 1) as partial:
        assert partial.parent == disk
        (partial / "file").write_text("written")
    assert (tmp_path / "out").is_symlink()
    assert (disk / "real" / "file").read_text() == "written"
    with pytest.raises(CheckpointError, match="not empty"), staged(tmp_path / "out", 1):
        pass


def to_hf(out):
    return convert(ConvertConfig(source="owner/name", destination=out, to="hf"), Console(quiet=True))


def to_maxtext_items(out):
    return to_maxtext(ToMaxTextConfig(hf_model_path="owner/name", base_output_directory=out), Console(quiet=True))


def export(out):
    return to_huggingface(ExportConfig(load_parameters_path="owner/name", base_output_directory=out))


@pytest.mark.parametrize("start", [to_hf, to_maxtext_items, export], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", ["a file", "under a file", "not writable"])
def test_a_place_that_cannot_be_written_is_refused_before_a_source_is_looked_for(start, place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    out = str({"a file": tmp_path / "file", "under a file": tmp_path / "file" / "out"}.get(place, tmp_path / "out"))
    if place == "not writable":
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(CheckpointError, match=r"cannot be made|not empty"):
        start(out)
    assert (tmp_path / "file").read_text() == "mine"
