"""Telling a pool manager about this worker: what is said, how it is sent, when."""
