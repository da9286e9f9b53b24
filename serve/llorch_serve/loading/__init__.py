"""Model loading: from a folder to a worker that answers, and how far that is."""
