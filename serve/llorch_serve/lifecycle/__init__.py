"""A worker's life: load, serve, drain, end."""
