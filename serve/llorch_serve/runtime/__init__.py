"""Graphs on a provider: opened, bound to buffers, and run."""
