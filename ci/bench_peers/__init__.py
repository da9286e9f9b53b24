"""llorch beside other engines: the same model, the same work, turn by turn in one run.

Input: a GGUF file, the folder of peers that ``ci/peers`` sets up, and the recipes of :mod:`bench_peers.ours`.
Output: ``docs/performance.md``, its pictures and the measurements as JSON. This package is for ``ci`` alone
and is in no wheel.
"""
