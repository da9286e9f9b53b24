"""Reasoning and calls of tools, read out of generated text as it grows."""
