"""What a run shows and leaves behind: metrics, rollout records, lines in the terminal, the curve and the
summary.

Everything here works on plain numbers and strings and runs without jax; errors are plain ValueErrors.
"""
