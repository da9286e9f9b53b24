"""One model on many replicas: where each runs, which of them answers a request, and what they are together.

Ray places, restarts and counts the replicas; only a few modules import it, and a plain worker imports none of
this.
"""
