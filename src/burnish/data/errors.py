"""The data room's errors: about files, columns, templates and tokenizers that the user named."""

from burnish.errors import BurnishError


class DataError(BurnishError, ValueError):
    """Data, a template or a tokenizer is not what an option says it is. The message names the option."""
