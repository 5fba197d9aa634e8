"""The error of a job, a cluster or a machine that cannot be had as it was asked for."""

from burnish.errors import BurnishError


class LaunchError(BurnishError):
    """A flag is wrong, something that was named does not exist, or the other side refused."""
