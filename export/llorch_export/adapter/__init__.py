"""Adapters in PEFT's format: read with suspicion, and merged into a checkpoint."""
