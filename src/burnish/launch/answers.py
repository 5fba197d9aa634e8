"""How the commands' answers are written: JSON for programs, YAML for people.

In YAML a text of several lines, such as a job's command, stands as it was typed, and nothing is replaced by a reference
to where it was said before.
"""

import json
from typing import Any

import yaml


def json_text(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False)


def yaml_text(*documents: Any) -> str:
    """The documents, each with its line end; what stands between two of them is ---."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    if any(character in text for character in "\r\x85\u2028\u2029\ufeff"):
        style = '"'  # elsewhere readers take these for line ends, or drop them
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
