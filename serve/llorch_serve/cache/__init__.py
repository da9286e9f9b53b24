"""Keys and values: how many fit, and where they lie."""
