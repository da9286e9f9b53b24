"""Run a llorch artifact on ONNX Runtime: engine, terminal commands and the gRPC worker."""
