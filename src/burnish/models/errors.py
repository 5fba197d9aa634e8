"""What can be wrong with a model's description."""

from burnish.errors import BurnishError


class ModelError(BurnishError):
    """A config.json asks for something that the decoder does not do, or disagrees with the named preset."""
