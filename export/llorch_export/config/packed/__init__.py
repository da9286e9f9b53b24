"""How a checkpoint says that a tool has packed its weights: ``quantization_config``, format by format."""
