"""The table of faults in README.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
REFERENCE = re.compile(r"`(…|[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_in_the_table_exists():
    file, missing, count = "", [], 0
    for name, test in REFERENCE.findall((TESTS / "README.md").read_text(encoding="utf-8")):
        file = file if name == "…" else name
        source = (TESTS / file).read_text(encoding="utf-8") if (TESTS / file).exists() else ""
        count += 1
        if not source or (test and f"def {test}(" not in source):
            missing.append(f"{file}::{test}")
    assert missing == []
    assert count > 50
