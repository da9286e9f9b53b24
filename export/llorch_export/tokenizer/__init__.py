"""Tokenizers, chat templates and recommended sampling of a checkpoint."""
