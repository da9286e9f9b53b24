"""Token ids to text and back: the tokenizer, stop strings, and text that comes token by token."""
