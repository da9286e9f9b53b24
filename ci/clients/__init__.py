"""People's own clients, each in an environment of its own, against a real worker."""
