"""Right answers from another source than the code that is tested."""
