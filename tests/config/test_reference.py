"""docs/options.md says what the schema says."""

import subprocess
import sys
from pathlib import Path

from burnish.config.fields import options_of
from burnish.config.reference import options_markdown
from burnish.config.schema import COMMANDS

DOCS = Path(__file__).parents[2] / "docs" / "options.md"


def test_options_page_is_current():
    assert DOCS.read_text(encoding="utf-8") == options_markdown(), "run: python -m burnish.config.reference"


def test_every_option_of_every_command_is_on_the_page():
    page = options_markdown()
    for command, config in COMMANDS.items():
        assert command in page
        for info in options_of(config):
            assert f"| `{info.name}` |" in page


def test_the_page_can_be_written_elsewhere(tmp_path):
    subprocess.run([sys.executable, "-m", "burnish.config.reference", str(tmp_path / "o.md")], check=True)
    assert (tmp_path / "o.md").read_text(encoding="utf-8") == options_markdown()
