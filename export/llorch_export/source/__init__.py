"""Where a checkpoint is found, and how it is opened."""
