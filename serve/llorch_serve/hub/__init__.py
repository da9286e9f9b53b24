"""Repositories of a model hub: how they are named, listed, fetched and written to."""
