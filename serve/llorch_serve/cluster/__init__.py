"""One model behind many replicas, on nodes that Ray leads; needs the extra ``ray``."""
