"""A worker's front over many replicas, each a whole worker, that Ray places and restarts."""
