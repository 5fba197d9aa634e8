"""Errors of this room."""

from burnish.errors import BurnishError


class MeshError(BurnishError):
    """A mesh that the devices or the model can not have."""


class ProcessError(BurnishError):
    """Another process of the run failed, or the processes could not find one another."""
