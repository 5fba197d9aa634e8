"""The `burnish` program: it parses a command line, calls one function of another room, and prints errors.

Nothing is computed here, and importing it imports neither jax nor transformers.
"""
