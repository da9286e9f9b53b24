"""Files of requests in, files of answers out: each line exactly once, however often a run is interrupted."""
