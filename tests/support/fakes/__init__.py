"""Stand-ins for a model, a session, a runtime, time and a pool manager."""
