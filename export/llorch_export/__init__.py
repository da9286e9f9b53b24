"""Turn a Llama-family checkpoint into a llorch artifact: ONNX graph, tokenizer, template and manifest."""
