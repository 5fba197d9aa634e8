"""Bytes of the user's files as text. Everything that is read is UTF-8; what is not is an error that says where, in
place of the decoder's own."""

from burnish.errors import BurnishError


def decode(data: bytes, source: str, error: type[BurnishError]) -> str:
    """The text, with line ends as \\n. Raises `error`, naming `source`, where the bytes are not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{source}: not UTF-8 text, byte {cause.start} is 0x{data[cause.start]:02x}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
