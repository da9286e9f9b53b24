"""What a checkpoint says of its model, checked: Hugging Face's config.json and GGUF's metadata."""
