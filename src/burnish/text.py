"""Bytes of the user's files as text. Everything that is read is UTF-8; what is not is an error that says where, in
place of the decoder's own."""

import json
from typing import Any

from burnish.errors import BurnishError


def decode(data: bytes, source: str, error: type[BurnishError]) -> str:
    """The text, with line ends as \\n. Raises `error`, naming `source`, where the bytes are not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{source}: not UTF-8 text, byte {cause.start} is 0x{data[cause.start]:02x}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_lines(text: str, source: str, error: type[BurnishError]) -> list[Any]:
    """The values of JSON lines, empty lines left out. Raises `error` with the number of the line at fault."""
    values = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except json.JSONDecodeError as cause:
                raise error(f"{source}, line {number}, column {cause.colno}: not JSON ({cause.msg})") from None
    return values


def check_no_surrogates(text: str) -> None:
    """Raises ValueError where the text has half a character, which JSON can say but UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise ValueError(f"character {cause.start} is the lone surrogate U+{ord(text[cause.start]):04X}") from None
