"""What the user asked for: every option of every command as a typed model, and how command lines fill it.

`schema` holds the models, `overrides` reads recipes and `key=value`, `reference` writes docs/options.md.
Nothing here imports jax: options are checked before anything expensive starts.
"""
