"""Writes docs/options.md from the schema: per command and section, each option's values, default and meaning.

`python -m burnish.config.reference [FILE]`; a test fails where the file in the repository is older than the
schema.
"""

import sys
from itertools import groupby
from pathlib import Path

from burnish.config.fields import OptionInfo, options_of
from burnish.config.schema import COMMANDS

_INTRODUCTION = """\
# Options

Made from the schema by `python -m burnish.config.reference`; do not edit.

Options are given as `key=value`, `--key=value` or `--key value` (in names, `-` is the same as `_`), and in recipes:
YAML files named on the command line, of which a later one wins over an earlier one and the command line over all.
Lists and mappings are written as YAML or JSON, or, where an option may be given several times, one value each time.
`null` (or nothing after `=`) unsets an option that may be null. Names are
MaxText's where it has the option. Options under "Devices and other engines" exist so that command lines for
larger machines can be read: they take the values that ask for what happens anyway and refuse every other one.
"""


def options_markdown() -> str:
    """The whole text of docs/options.md."""
    parts = [_INTRODUCTION]
    for config in dict.fromkeys(COMMANDS.values()):
        *names, last = (name for name, other in COMMANDS.items() if other is config)
        parts.append(f"## {', '.join(names)} and {last}\n" if names else f"## {last}\n")
        for section, infos in groupby(options_of(config), key=lambda info: info.section):
            rows = [
                f"| `{info.name}` | "
                + " | ".join(map(_cell, (info.type_words, info.default_words, _meaning(info))))
                + " |"
                for info in infos
            ]
            parts.append(
                "\n".join(
                    [
                        f"### {section}\n",
                        "| option | values | default | meaning |",
                        "|---|---|---|---|",
                        *rows,
                        "",
                    ]
                )
            )
    return "\n".join(parts)


def _meaning(info: OptionInfo) -> str:
    return f"{info.meaning}; for short -{info.short}" if info.short else info.meaning


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/options.md").write_text(options_markdown(), encoding="utf-8")
