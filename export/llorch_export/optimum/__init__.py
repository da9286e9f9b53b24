"""Optimum's ONNX export as a second way from a checkpoint to an artifact, independent of llorch's own
graph.
"""
