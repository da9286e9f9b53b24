"""What a worker tells of its work: metrics, logs and traces.

Input: requests and their updates, seen on the way between the generator and whoever asked (``tap.py``).
Output: Prometheus' text, log lines, spans. Nothing here holds up the engine's thread, and no text of a prompt
or an answer leaves through it.
"""
