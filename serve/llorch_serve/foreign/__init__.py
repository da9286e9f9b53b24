"""Folders that onnxruntime-genai's builder or Optimum made: recognised, described and run as they are."""
