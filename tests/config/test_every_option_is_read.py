"""An option that no code reads would be swallowed in silence."""

import re
from pathlib import Path

import pytest

import burnish
from burnish.config.fields import options_of
from burnish.config.schema import COMMANDS

SOURCE = Path(burnish.__file__).parent
CODE = "\n".join(
    path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if SOURCE / "config" not in path.parents
)
# Options whose every accepted value asks for what happens anyway have nothing that could read them.
READABLE = sorted(
    {info.name for config in COMMANDS.values() for info in options_of(config) if info.single_device is None}
)
# Options that are read through a function of config/: how a call of it looks.
READ_THROUGH = {"eval_sampling_strategy": r"\beval_sampling\("}


@pytest.mark.parametrize("name", READABLE)
def test_option_is_read(name):
    leaf = name.rpartition(".")[2]
    pattern = READ_THROUGH.get(name, rf"\.(resolved_)?{leaf}\b")
    assert re.search(pattern, CODE), f"no code outside config/ reads {name}"


def test_options_that_change_nothing_here_are_said_to():
    assert re.search(r"\bnotes\(", CODE), "burnish.config.describe.notes is not called"
