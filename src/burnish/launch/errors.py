"""The error of a job, a cluster or a machine that cannot be had as it was asked for."""

from burnish.errors import BurnishError


class LaunchError(BurnishError):
    """A flag is wrong, something that was named does not exist, or the other side refused."""


def waited_too_long(name: str, seconds: float) -> LaunchError:
    """The error of a wait that is given up; its exit code is that of timeout(1)."""
    return LaunchError(f"job {name} has not ended within {seconds:g} s; it goes on", exit_code=124)
