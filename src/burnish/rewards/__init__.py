"""Rewards: what a completion is worth. The room finds the answer in a completion, checks it against the
gold one in worker processes that can be killed, and adds up the parts of the reward; it knows text only,
never tokens or weights, and never imports jax."""
