"""How answers are written: the same values as JSON and as YAML, texts of several lines as they were typed."""

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from burnish.launch.answers import json_text, yaml_text

TEXTS = st.text() | st.sampled_from(["1h", "yes", "a\nb", "a \n b\n", "\t", "\x85", "a\r\nb", "a\u2028\n"])
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.lists(VALUES, min_size=1, max_size=3))
def test_what_is_written_is_read_back(documents):
    assert list(yaml.safe_load_all(yaml_text(*documents))) == documents
    assert json.loads(json_text(documents)) == documents


def test_a_command_of_several_lines_stands_as_it_was_typed():
    command = "if true; then\n    run \\\n        a=b\nfi"
    shared = {"name": "x"}
    assert yaml_text({"command": command, "first": shared, "second": shared}) == (
        "command: |-\n  if true; then\n      run \\\n          a=b\n  fi\nfirst:\n  name: x\nsecond:\n  name: x\n"
    )
