"""Divergence against size, recipe by recipe."""
