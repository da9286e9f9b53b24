"""Files by which other runtimes load an artifact."""
