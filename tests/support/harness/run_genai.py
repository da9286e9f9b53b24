"""Answer prompts with onnxruntime-genai: run by an interpreter that has it, not by pytest's.

usage: PYTHON run_genai.py FOLDER <questions >answers. Questions is a JSON object: ``texts`` to tokenise,
    ``prompts`` as
lists of ids to continue one by one, ``batch`` of the same to continue together, ``steps`` of greedy choice.
Answers are the ids of each, padding left out, and ``decoded``, the texts again.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnxruntime_genai as genai


def continued(model: genai.Model, prompts: list[list[int]], steps: int, pad: int) -> list[list[int]]:
    """Return what is chosen after each prompt, up to an end of sequence."""
    width = max(map(len, prompts))
    params = genai.GeneratorParams(model)
    params.set_search_options(
        max_length=width + steps, min_length=width + steps, do_sample=False, batch_size=len(prompts)
    )
    generator = genai.Generator(model, params)
    rows = [prompt + [pad] * (width - len(prompt)) for prompt in prompts]
    generator.append_tokens(np.array(rows if len(rows) > 1 else rows[0], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(id_) for id_ in generator.get_sequence(row)][width:] for row in range(len(prompts))]


def main() -> None:
    """Read questions, write answers."""
    folder, questions = sys.argv[1], json.load(sys.stdin)
    model = genai.Model(folder)
    tokenizer = genai.Tokenizer(model)
    tokenizer.update_options(add_special_tokens="true")  # its default is no begin of sequence
    pad, steps = tokenizer.pad_token_id, questions["steps"]
    texts = [tokenizer.encode(text) for text in questions["texts"]]
    answers = {
        "texts": [[int(id_) for id_ in ids] for ids in texts],
        "decoded": [tokenizer.decode(ids) for ids in texts],
        "prompts": [continued(model, [prompt], steps, pad)[0] for prompt in questions["prompts"]],
        "batch": continued(model, questions["batch"], steps, pad) if questions["batch"] else [],
    }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
