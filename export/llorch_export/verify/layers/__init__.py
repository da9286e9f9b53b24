"""Proof of an artifact layer by layer: the shipped graph's own values against the reference's."""
