"""How far a model's answers are from a reference's."""
