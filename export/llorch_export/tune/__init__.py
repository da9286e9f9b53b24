"""The best recipe for this machine, within bounds of divergence and memory."""
