"""Measuring a model's speed: the work, the measurement, the report."""
