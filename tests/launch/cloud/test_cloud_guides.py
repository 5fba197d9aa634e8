"""Every burnish command in the guides of clusters and machines is one that the program takes."""

import re
import shlex
from pathlib import Path

import pytest

from burnish.cli.commands import COMMANDS
from burnish.config.overrides import load_config
from burnish.config.schema import COMMANDS as CONFIGS
from burnish.launch.cloud import vm

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def typed(guide: str) -> list[list[str]]:
    """The words of each command in the guide's code blocks."""
    text = (GUIDES / guide).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(block for language, block in blocks if not language).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("burnish ")]


CASES = [(guide, words) for guide in ("tpu-vm.md", "gke.md") for words in typed(guide)]


@pytest.mark.parametrize(("guide", "words"), CASES, ids=[f"{guide}: {' '.join(words[:3])}" for guide, words in CASES])
def test_commands_of_the_guides_are_understood(guide, words, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for length in (3, 2, 1):
        name = " ".join(words[:length])
        command = next((c for c in COMMANDS if name in (c.name, c.alias)), None)
        if command is not None:
            load_config(CONFIGS[command.name], words[length:], command.positional)
            return
    raise AssertionError(f"{guide}: no such command: {' '.join(words)}")


def test_the_guides_have_all_commands_of_clusters_and_machines():
    shown = {" ".join(words[:2]) for _, words in CASES}
    assert {c.name for c in COMMANDS if c.name.startswith(("cluster ", "vm "))} <= shown


def test_the_environment_that_the_guide_shows_is_the_one_that_is_printed():
    text = (GUIDES / "tpu-vm.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^export (TPU_\w+)=(.*)$", text, re.MULTILINE)) == vm.tpu_environment("ct6e-standard-8t")
