"""How far an exported model is from its reference."""
