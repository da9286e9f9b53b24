"""Inputs for tests: checkpoints, tokenizers, artifacts, folders of other tools, reports."""
