"""Errors of this room."""

from burnish.errors import BurnishError


class PlanError(BurnishError):
    """A plan that cannot be made: an unknown topology, a missing compiler, sizes that do not fit together."""
