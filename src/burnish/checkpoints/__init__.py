"""Checkpoints: Hugging Face import, export and verification, and the training store."""
