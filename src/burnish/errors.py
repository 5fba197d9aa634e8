"""Errors that are the user's to fix: the command line prints their message alone, without a traceback.

A room raises BurnishError (or a subclass) when the message says everything: what was wrong, which value, what
would be right. Any other exception is a fault of the program and shows its traceback.
"""


class BurnishError(Exception):
    """A failure with a message for the person at the terminal; `exit_code` is the status of the process."""

    exit_code: int = 1

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code
