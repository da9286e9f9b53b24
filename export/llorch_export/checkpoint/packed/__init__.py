"""Weights that a tool has packed, read as exact values and, where they are codes with scales, as codes."""
