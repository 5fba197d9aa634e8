"""What can be wrong with a checkpoint."""

from burnish.errors import BurnishError


class CheckpointError(BurnishError):
    """A checkpoint is missing, incomplete, damaged or not what was asked for; the message names the part."""
