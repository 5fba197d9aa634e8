"""The error of a wrong option."""

from burnish.errors import BurnishError


class ConfigError(BurnishError, ValueError):
    """An option is unknown, of the wrong type, out of range or at odds with another one."""

    exit_code = 2
