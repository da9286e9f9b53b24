"""Running a folder's genai graph by onnxruntime alone, fed as onnxruntime-genai feeds it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

Logits = npt.NDArray[np.float32]


class GenaiFeeder:
    """A batch of sequences: one buffer for past and present, a mask that grows, names from
    ``genai_config.json``.

    Prompts of a first call are padded behind to the longest, and the padding stays masked, as
    onnxruntime-genai does.
    """

    def __init__(self, folder: Path, *, batch: int = 1, capacity: int = 64) -> None:
        config = json.loads((folder / "genai_config.json").read_text())["model"]
        decoder = config["decoder"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            folder / decoder["filename"], options, providers=["CPUExecutionProvider"]
        )
        shape = (batch, decoder["num_key_value_heads"], capacity, decoder["head_size"])
        self._binding = self._session.io_binding()
        self._names = decoder["inputs"] | decoder["outputs"]
        self._mask = np.zeros((batch, 0), np.int64)
        self._vocabulary = config["vocab_size"]
        self._cache = []
        for layer in range(decoder["num_hidden_layers"]):
            for kind in ("key", "value"):
                buffer = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
                self._cache.append(buffer)
                self._binding.bind_ortvalue_input(self._names[f"past_{kind}_names"] % layer, buffer)
                self._binding.bind_ortvalue_output(self._names[f"present_{kind}_names"] % layer, buffer)

    def feed(self, *rows: list[int]) -> Logits:
        """Run one call with the next tokens of every row; return the logits of each row's last one."""
        width = max(map(len, rows))
        ids = np.zeros((len(rows), width), np.int64)
        real = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)], real[index, : len(row)] = row, 1
        self._mask = np.concatenate([self._mask, real], axis=1)
        self._binding.bind_cpu_input(self._names["input_ids"], ids)
        self._binding.bind_cpu_input(self._names["attention_mask"], self._mask)
        self._binding.bind_output(self._names["logits"])
        self._session.run_with_iobinding(self._binding)
        logits: Logits = self._binding.get_outputs()[-1].numpy()
        assert logits.shape == (len(rows), 1, self._vocabulary)
        return logits[:, 0]
