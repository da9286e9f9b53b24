"""Write the first inputs of every target to ``tests/data/fuzz``: ``python -m fuzz.seeds``. Small and valid,
for fuzzing to begin from.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import sentencepiece

from fuzz.targets import CORPUS, SMALLEST, TOOL
from llorch_serve.artifact.manifest import encode_manifest
from llorch_serve.fidelity.reference_file import ReferenceHeader, text_hash, write_reference
from llorch_serve.rpc import worker_pb2 as pb
from support.builders import (
    adapters,
    bench_reports,
    chat_templates,
    checkpoints,
    foreign_folders,
    ranked_tokens,
    tiny_artifact,
    tiny_tokenizers,
)


def seeds(scratch: Path) -> Iterator[tuple[str, str, bytes]]:
    """Give target, name and content of each."""
    checkpoints.write_hf_folder(scratch / "smallest", SMALLEST, dtype="BF16", tokenizer=False)
    yield "safetensors", "tiny", (scratch / "smallest" / "model.safetensors").read_bytes()
    folder = scratch / "hf"
    checkpoints.write_hf_folder(folder)
    checkpoints.write_gguf(
        scratch / "tiny.gguf", {**SMALLEST, "vocab_size": checkpoints.VOCAB_SIZE}, weight_type="F16"
    )
    yield "gguf", "tiny", (scratch / "tiny.gguf").read_bytes()
    names = ("config.json", "tokenizer_config.json", "generation_config.json", "added_tokens.json")
    found = {name: json.loads((folder / name).read_text()) for name in names if (folder / name).exists()}
    found.setdefault(
        "generation_config.json",
        {"eos_token_id": [1, 3], "temperature": 0.6, "top_p": 0.9, "do_sample": True},
    )
    found.setdefault("added_tokens.json", {"<|turn|>": 2})
    yield "checkpoint", "tiny", json.dumps(found).encode()
    scaled = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yield (
        "checkpoint",
        "rope",
        json.dumps(found | {"config.json": checkpoints.tiny_config(rope_scaling=scaled)}).encode(),
    )
    for family in ("qwen3", "smollm3", "granite", "phi3"):
        config = checkpoints.tiny_config(**checkpoints.of_family(family))
        yield "checkpoint", family, json.dumps(found | {"config.json": config}).encode()
    hidden = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": shape
        for side, shape in {"A": [4, 16], "B": [16, 4]}.items()
    }
    yield (
        "adapter",
        "q",
        json.dumps({"config": adapters.settings(target_modules=["q_proj"]), "tensors": hidden}).encode(),
    )
    prefix = "base_model.model.model.layers.0.self_attn"
    rich = {
        f"{prefix}.q_proj.lora_A.default.weight": [4, 16],
        f"{prefix}.q_proj.lora_B.default.weight": [16, 4],
        f"{prefix}.q_proj.lora_magnitude_vector": [16],
        "base_model.model.lm_head.modules_to_save.weight": [512, 16],
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": [2, 16],
    }
    changes = {
        "target_modules": r".*\.(q_proj)",
        "rank_pattern": {"^model.*q_proj": 4},
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": [1, 5],
        "use_dora": True,
    }
    yield "adapter", "rich", json.dumps({"config": adapters.settings(**changes), "tensors": rich}).encode()
    model = scratch / "spm"
    (scratch / "text").write_text(
        "\n".join(["hello world of tokens", "the quick brown fox", "jumps over the lazy dog"] * 50)
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(scratch / "text"), model_prefix=str(model), vocab_size=300, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    yield "sentencepiece", "bpe", model.with_suffix(".model").read_bytes()
    yield "tekken", "small", json.dumps(ranked_tokens.tekken_document(), separators=(",", ":")).encode()
    yield "tokenizer", "byte-level", tiny_tokenizers.byte_level().to_str().encode()
    yield "tokenizer", "byte-fallback", tiny_tokenizers.byte_fallback().to_str().encode()
    yield "tokenizer", "metaspace", tiny_tokenizers.byte_fallback(metaspace=True).to_str().encode()
    for recipe in ("cpu", "cpu-fast"):
        origin = resources.files("llorch_export.recipes").joinpath(f"{recipe}.toml")
        yield "recipe", recipe, origin.read_bytes()
    yield "manifest", "tiny", encode_manifest(tiny_artifact.tiny_manifest())
    yield "report", "two", msgspec.json.encode(bench_reports.report(
        bench_reports.entry("a", bench_reports.rows([900.0, 910.0], [50.0, 51.0])), bench_reports.entry("b")
    ))  # fmt: skip
    ids = (5, 6, 7)
    header = ReferenceHeader(
        oracle="transformers", source_fingerprint="0" * 64, tokenizer_sha256="0" * 64, text="random", text_sha256=text_hash(ids), vocab_size=8,
        token_ids=ids,
    )  # fmt: skip
    write_reference(scratch / "reference", header, np.zeros((3, 8), np.float32))
    yield "reference", "three", (scratch / "reference").read_bytes()
    for name in ("SMOLLM2", "LLAMA2"):
        yield "template", name.lower(), getattr(chat_templates, name).encode()
    yield "template", "expressions", EXPRESSIONS.encode()
    foreign = foreign_folders.write_genai_folder(scratch / "genai")
    config = {"genai_config.json": json.loads((foreign / "genai_config.json").read_text())}
    foreign = foreign_folders.write_optimum_folder(scratch / "optimum")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        config[name] = json.loads((foreign / name).read_text())
    yield "foreign", "both", json.dumps(config).encode()
    for name, body in BODIES.items():
        yield "http", name, json.dumps(body).encode()
    yield "form", "file", FORM
    yield from (("protobuf", name, message.SerializeToString()) for name, message in messages().items())
    for name, text in ANSWERS.items():
        yield "answer", name, text.encode()


EXPRESSIONS = (
    "{% set ns = namespace(n=0) %}{% macro line(m) %}{{ m.role|upper }}: {{ m.content is string and "
    "m.content|trim }}{% endmacro %}"
    "{% for m in messages if m.role != 'tool' %}{% set ns.n = ns.n + 1 %}{{ line(m) }}{{ '%s-%5d' % "
    "(m.role, ns.n) }}"
    "{{ '{:>10}'.format(m.role) }}{{ loop.index0 }}{{ xs[1:] == xs[:-1] }}{{ xs|sort|join(', ') }}{% endfor "
    "%}"
    "{% if tools %}{{ tools|tojson(indent=2) }}{{ tools[0].function.parameters.items()|list }}{% endif %}"
    "{{ 'a' * 10 ~ text.replace('a', 'bb').split('b')|length }}{{ deep.a|map(attribute='b')|first }}{{ "
    "range(5)|batch(2)|list }}"
    "{{ (messages|selectattr('role', 'equalto', 'user')|list|last).content }}{{ strftime_now('%d %b %Y') "
    "}}{{ raise_exception('no') if n < 0 }}"
)
FORM = (
    b"multipart/form-data; boundary=7e3b\n"
    b'--7e3b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--7e3b\r\nContent-Disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at\r\n'
    b'--7e3b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n'
    b'--7e3b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n{}\r\n--7e3b--\r\n"
)

BODIES = {
    "batch": {
        "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "chat": {
        "model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2,
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}], "n": 2, "stop": ["a"],
        "tools": [json.loads(TOOL)], "tool_choice": "auto", "logit_bias": {"5": 1.5}, "seed": 1, "temperature": 0.5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "completion": {"model": "tiny", "prompt": ["hello", [1, 2, 3]], "max_tokens": 4, "echo": True, "logprobs": 3, "best_of": 2, "user": "me"},
    "job": {"prompt": "hello", "job_id": "j", "max_tokens": 4, "temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": 5},
    "cancel": {"job_id": "j"},
}  # fmt: skip
ANSWERS = {
    "tagged": '<think>so</think>Sure.<tool_call>\n{"name": "weather", "arguments": {"city": '
    '"Paris"}}\n</tool_call>',
    "json": '{"name": "weather", "parameters": {"city": "Par\\"is"}}; {"name": "x", "arguments": "{}"}',
    "list": '[TOOL_CALLS] [{"name": "weather", "arguments": {}}]<|tool_call|>[{"name": "weather"}]',
    "granite": "<think>a</think><response>b</response> <function=weather>{}</function>",
}


def messages() -> dict[
    str,
    pb.GenerateRequest | pb.ScoreRequest | pb.GenerateStreamRequest | pb.TokenizeRequest | pb.AbortRequest,
]:
    """Return a message of each kind that holds text from a stranger."""
    request = pb.GenerateRequest(request_id="r", client_id="c", priority=1, model="tiny")
    request.input.text = "hello"
    request.sampling.temperature, request.sampling.seed, request.sampling.n = 0.5, 3, 2
    request.sampling.stop.append("x")
    request.sampling.logit_bias[5] = 1.0
    request.sampling.json_schema = '{"type": "object"}'
    chat = pb.GenerateRequest()
    message = chat.input.chat.messages.add(role="user", content="hello")
    message.tool_calls.add(name="weather", arguments="{}")
    chat.input.chat.tools.append(TOOL)
    chat.input.chat.template_arguments = '{"a": 1}'
    score = pb.ScoreRequest(request_id="s", logprobs=2)
    score.context.text = "hello"
    score.continuations.add(text=" world")
    score.continuations.add().tokens.ids.extend([1, 2])
    tokens = pb.TokenizeRequest()
    tokens.input.tokens.ids.extend([1, 2, 3])
    return {
        "generate": request,
        "chat": chat,
        "stream": pb.GenerateStreamRequest(request=request),
        "score": score,
        "tokens": tokens,
        "abort": pb.AbortRequest(request_ids=["a", "b"]),
    }


def main() -> None:
    """Write them all."""
    with tempfile.TemporaryDirectory() as scratch:
        for target, name, content in seeds(Path(scratch)):
            path = CORPUS / target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


if __name__ == "__main__":
    main()
