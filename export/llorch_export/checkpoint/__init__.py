"""Read checkpoints lazily: GGUF files, Hugging Face folders and hub ids become a :class:`Checkpoint`."""
