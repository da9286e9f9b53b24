"""The text that an export measures a model on, and types of what is measured."""
