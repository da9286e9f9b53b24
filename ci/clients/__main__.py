"""Runs every client against two workers and writes docs/clients.md: see ``ci/test-clients --help``."""

from __future__ import annotations

from clients.run import main

if __name__ == "__main__":
    main()
