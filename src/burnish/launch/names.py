"""What may be called how: the form of names that Google Cloud and Kubernetes have in common (RFC 1035)."""

import re

from burnish.launch.errors import LaunchError

RFC_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def check_name(name: str, longest: int, at_most: str) -> None:
    """Raises LaunchError where --name is no such name or longer than `longest`; `at_most` says so, with {} for
    the number."""
    if len(name) > longest:
        raise LaunchError(f"--name={name} has {len(name)} characters; {at_most.format(longest)}")
    if not RFC_1035.fullmatch(name):
        raise LaunchError(
            f"--name={name}: expected a lower-case letter, then lower-case letters, digits and '-', no '-' at the end"
        )
