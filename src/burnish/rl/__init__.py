"""The update and the loops around it: advantages, packing, losses, optimizer, training, evaluation, SFT."""
