"""Stop strings: they are looked for in decoded text, on the host, because token borders need not be
theirs."""

from collections.abc import Callable, Sequence


def stop_string_end(
    tokens: Sequence[int], checked: int, stop_strings: Sequence[str], decode: Callable[[list[int]], str]
) -> int | None:
    """The least number of tokens, above `checked`, whose text contains a stop string; None when all of them
    do not.

    `checked`: how many tokens are known to hold none.
    """
    if not any(s in decode(list(tokens)) for s in stop_strings):
        return None
    for end in range(checked + 1, len(tokens)):
        text = decode(list(tokens[:end]))
        if any(s in text for s in stop_strings):
            return end
    return len(tokens)
