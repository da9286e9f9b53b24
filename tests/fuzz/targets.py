"""The parsers that are fuzzed, a row each: input is bytes, and what may come out is a result or an error of
ours.

Whatever else is raised is a finding; so is a process that dies, and an input that takes long or much memory,
which ``fuzz/limits.py`` judges.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from llorch_export.adapter.apply import adapt
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.safetensors import folder_tensors
from llorch_export.checkpoint.safetensors_file import file_tensors
from llorch_export.config.hf import config_from_hf
from llorch_export.config.packed.reading import read_packing
from llorch_export.options import ExportOptions
from llorch_export.recipes.file import parse_recipe
from llorch_export.source.open import open_checkpoint
from llorch_export.tokenizer.bpe import byte_level_bpe, sentencepiece_bpe
from llorch_export.tokenizer.reading import tokenizer_from_folder
from llorch_export.tokenizer.sentencepiece_model import read_sentencepiece
from llorch_export.tokenizer.tekken import read_tekken
from llorch_serve.artifact.manifest import decode_manifest
from llorch_serve.bench.schema import read_report
from llorch_serve.calls.callers import Caller
from llorch_serve.chat.parsing.answer import parser_for
from llorch_serve.chat.parsing.registry import REASONING_FORMATS, AnswerFormats
from llorch_serve.chat.parsing.tool_formats import TOOL_FORMATS
from llorch_serve.chat.template import ChatTemplate, encode_chat
from llorch_serve.errors import LlorchError
from llorch_serve.fidelity.reference_file import read_reference
from llorch_serve.foreign.genai import describe_genai
from llorch_serve.foreign.optimum import describe_optimum
from llorch_serve.http.batches.reading import read_batch
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.batches.store import Store
from llorch_serve.http.batches.uploads import Upload
from llorch_serve.http.fields import read_struct
from llorch_serve.http.job_routes import CancelBody, JobDialect
from llorch_serve.http.openai_requests import read_chat, read_completion
from llorch_serve.requests import ChatMessage, ChatPrompt, ModelInfo, whole_calls
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert import read_abort_request, read_generation_request
from llorch_serve.rpc.convert_prompt import read_prompt, read_token_ids
from llorch_serve.rpc.convert_score import read_score_request
from llorch_serve.rpc.wire import check_fields
from llorch_serve.text.tokenizer import TextStream, Tokenizer
from support.builders.checkpoints import tiny_config, tiny_tokenizer_json

CORPUS = Path(__file__).parent.parent / "data" / "fuzz"
CALLER = Caller("", "somebody", "an-id")
INFO = ModelInfo(
    model_id="tiny",
    fingerprint="0" * 64,
    context_length=128,
    vocab_size=512,
    precision="fp32",
    head_precision="fp32",
    provider="cpu",
    provider_node_share=1.0,
    slots=4,
    has_chat_template=True,
    stop_token_ids=(1,),
    version="0",
    batch_invariant=True,
)
SMALLEST = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "tie_word_embeddings": True,
}
TOOL = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'


@dataclass(frozen=True)
class Target:
    """One parser. make: returns what is called with each input, once a process. json: inputs are mutated as
    JSON, too.
    """

    make: Callable[[], Callable[[bytes], object]]
    json: bool = False


@contextmanager
def folder_of(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Give a folder of its own with these files, in memory where the system has a place for that."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        for name, data in files.items():
            (Path(path) / name).write_bytes(data)
        yield Path(path)


def documents(data: bytes) -> dict[str, Any] | None:
    """Return an input that is one JSON object of several documents; None for all others."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _gguf() -> Callable[[bytes], object]:
    def run(data: bytes) -> None:
        with folder_of({"model.gguf": data}) as path:
            checkpoint = open_checkpoint(str(path / "model.gguf"))
            for tensor in checkpoint.tensors.values():
                tensor.load_rows(0, 1)

    return run


def _safetensors() -> Callable[[bytes], object]:
    config = config_from_hf(tiny_config(**SMALLEST))

    def run(data: bytes) -> None:
        with folder_of({"model.safetensors": data}) as path:
            file_tensors(path / "model.safetensors", ModelFolder(path))
            for tensor in folder_tensors(ModelFolder(path), config).tensors.values():
                tensor.load_rows(0, 1)

    return run


def _checkpoint_files() -> Callable[[bytes], object]:
    names = ("tokenizer_config.json", "generation_config.json", "added_tokens.json", "config.json")

    def run(data: bytes) -> None:
        found = documents(data)
        if found is None:
            return
        files = {name: json.dumps(found[name]).encode() for name in names if name in found}
        files["tokenizer.json"] = tiny_tokenizer_json().encode()
        with folder_of(files) as path:
            folder = ModelFolder(path)
            config = folder.read_json("config.json")
            if config is not None:
                config_from_hf(config)
                read_packing(config.get("quantization_config"), origin="config.json")
                tokenizer_from_folder(folder, config, vocab_size=512)

    return run


def _adapter() -> Callable[[bytes], object]:
    config = config_from_hf(tiny_config(**SMALLEST))
    with folder_of({"model.safetensors": (CORPUS / "safetensors" / "tiny").read_bytes()}) as path:
        tensors = folder_tensors(ModelFolder(path), config).tensors

    def run(data: bytes) -> None:
        found = documents(data)
        if found is None or not isinstance(found.get("tensors"), dict):
            return
        header: dict[str, Any] = {}
        end = 0
        for name, shape in found["tensors"].items():
            if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**12 for n in shape):
                return
            size = 4
            for dimension in shape:
                size *= dimension
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
            end += size
            if end > 2**20:
                return
        packed = json.dumps(header).encode()
        weights = len(packed).to_bytes(8, "little") + packed + bytes(end)
        files = {
            "adapter_config.json": json.dumps(found.get("config")).encode(),
            "adapter_model.safetensors": weights,
        }
        with folder_of(files) as path:
            adapted = adapt(config, tensors, (AdapterChoice(path),), source="tiny")
            for tensor in adapted.tensors.values():
                tensor.load_rows(0, min(tensor.shape[0], 2))

    return run


def _sentencepiece() -> Callable[[bytes], object]:
    def run(data: bytes) -> None:
        vocabulary = read_sentencepiece(
            data, add_bos=True, add_eos=False, vocab_size=512, origin="tokenizer.model"
        )
        built = sentencepiece_bpe(vocabulary).to_str()
        Tokenizer.from_json(built.encode(), origin="tokenizer.model").encode(
            "Hello, world", add_special_tokens=True
        )

    return run


def _tekken() -> Callable[[bytes], object]:
    def run(data: bytes) -> None:
        vocabulary = read_tekken(data, add_bos=True, add_eos=False, vocab_size=512, origin="tekken.json")
        built = byte_level_bpe(vocabulary).to_str()
        Tokenizer.from_json(built.encode(), origin="tekken.json").encode(
            "Hello, w\u00f6rld 123", add_special_tokens=True
        )

    return run


def _tokenizer() -> Callable[[bytes], object]:
    text = "Hello  wörld 東京 🙂 <|turn|> \u202eabc 1234567890\n\n\t<s>"

    def run(data: bytes) -> None:
        tokenizer = Tokenizer.from_json(data, origin="tokenizer.json")
        ids = tokenizer.encode(text, add_special_tokens=True)
        tokenizer.started(ids)
        tokenizer.decode(ids, keep_special_tokens=False)
        stream = TextStream(tokenizer, ("world", "\ufffd\ufffd"))
        for id_ in (*ids, *range(min(tokenizer.vocab_size, 600))):
            tokenizer.token_bytes(id_)
            tokenizer.token_text(id_)
            if stream.push(id_)[1] is not None:
                break
        else:
            stream.finish()
        prompt = ChatPrompt((ChatMessage("user", text),))
        template = ChatTemplate("{{ messages[0].content }}<|turn|>", None, None)
        encode_chat(tokenizer, template, prompt, most=4096, most_chars=2**16)

    return run


def _recipe() -> Callable[[bytes], object]:
    base = ExportOptions(source="model", output=Path("artifact"))
    return lambda data: parse_recipe(data, origin="recipe.toml").options(base)


def _manifest() -> Callable[[bytes], object]:
    return lambda data: decode_manifest(data, origin="llorch.json")


def _reference() -> Callable[[bytes], object]:
    def run(data: bytes) -> None:
        with folder_of({"reference": data}) as path:
            read_reference(path / "reference")

    return run


def _report() -> Callable[[bytes], object]:
    def run(data: bytes) -> None:
        with folder_of({"bench.json": data}) as path:
            read_report(path / "bench.json")

    return run


def _template() -> Callable[[bytes], object]:
    tokenizer = Tokenizer.from_json(tiny_tokenizer_json().encode(), origin="tokenizer.json")
    prompt = ChatPrompt(
        (
            ChatMessage("system", "Be brief."),
            ChatMessage("user", ("What is", " <|turn|> this?")),
            ChatMessage("assistant", "A test."),
        ),
        tools=(TOOL,),
        template_arguments='{"xs": [3, 1, 2], "n": 100000, "text": "abc", "deep": {"a": [{"b": [1]}]}}',
    )

    def run(data: bytes) -> None:
        template = ChatTemplate(data.decode("utf-8", "replace"), "<|bos|>", "<|eos|>")
        encode_chat(tokenizer, template, prompt, most=4096, most_chars=2**16)

    return run


def _http_body() -> Callable[[bytes], object]:
    reads: tuple[Callable[[bytes], object], ...] = (
        lambda raw: read_completion(raw, INFO, CALLER),
        lambda raw: read_chat(raw, INFO, CALLER),
        lambda raw: read_chat(raw, INFO, CALLER, []),
        lambda raw: JobDialect().read(raw, INFO, CALLER),
        lambda raw: read_struct(raw, CancelBody),
        lambda raw: read_batch(raw, None),
    )
    return lambda data: _each(reads, data)


def _form() -> Callable[[bytes], object]:
    """Read a form that is sent: its Content-Type, a line break, and its body, in two pieces."""

    def run(data: bytes) -> None:
        kind, _, body = data.partition(b"\n")
        with folder_of({}) as path:
            store = Store(BatchSettings(path))
            store.open()
            try:
                upload = Upload(store, "", kind.decode("latin-1"))
                try:
                    upload.write(body[: len(body) // 2])
                    upload.write(body[len(body) // 2 :])
                    upload.finish()
                finally:
                    upload.abandon()
            finally:
                store.close()

    return run


def _protobuf() -> Callable[[bytes], object]:
    def parsed(kind: Any, read: Callable[[Any], object]) -> Callable[[bytes], object]:
        def run(raw: bytes) -> object:
            check_fields(raw, kind.DESCRIPTOR)
            try:
                message = kind.FromString(raw)
            except DecodeError:
                return None
            return read(message)

        return run

    reads = (
        parsed(pb.GenerateRequest, read_generation_request),
        parsed(pb.GenerateStreamRequest, lambda message: read_generation_request(message.request)),
        parsed(pb.ScoreRequest, read_score_request),
        parsed(pb.AbortRequest, read_abort_request),
        parsed(pb.TokenizeRequest, lambda message: read_prompt(message.input)),
        parsed(
            pb.DetokenizeRequest,
            lambda m: read_token_ids(m.token_ids, field="token_ids"),
        ),
    )

    def run(data: bytes) -> None:
        _each(reads, data)

    return run


def _foreign() -> Callable[[bytes], object]:
    names = ("genai_config.json", "config.json", "generation_config.json", "tokenizer_config.json")

    def run(data: bytes) -> None:
        found = documents(data)
        if found is None:
            return
        files = {name: json.dumps(found[name]).encode() for name in names if name in found}
        files |= {"tokenizer.json": tiny_tokenizer_json().encode(), "model.onnx": b"", "model.onnx.data": b""}
        with folder_of(files) as path:
            _each((lambda _: describe_genai(path), lambda _: describe_optimum(path)), data)

    return run


def _answer() -> Callable[[bytes], object]:
    prompt = ChatPrompt((ChatMessage("user", "What is the weather?"),), tools=(TOOL,))
    formats = [AnswerFormats(tools, None) for tools in TOOL_FORMATS]
    formats += [AnswerFormats(TOOL_FORMATS[0], reasoning) for reasoning in REASONING_FORMATS]

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        for form in formats:
            whole = parser_for(form, prompt, "", key="k")
            pieces = parser_for(form, prompt, "", key="k")
            assert whole is not None
            assert pieces is not None
            together = (whole.push(text), whole.finish())
            apart = [*(pieces.push(char) for char in text), pieces.finish()]
            for name in ("text", "reasoning", "tool_calls"):
                # What is said does not depend on where it was cut.
                first, second = (
                    functools.reduce(operator.add, (getattr(piece, name) for piece in told))
                    for told in (together, apart)
                )
                if name == "tool_calls":
                    first, second = whole_calls(first), whole_calls(second)
                assert first == second, f"{name}: {first!r} at once, {second!r} by characters"

    return run


def _each(reads: tuple[Callable[[bytes], object], ...], data: bytes) -> None:
    for read in reads:
        try:
            read(data)
        except LlorchError:
            continue


TARGETS: Mapping[str, Target] = {
    "adapter": Target(_adapter, json=True),
    "answer": Target(_answer),
    "checkpoint": Target(_checkpoint_files, json=True),
    "foreign": Target(_foreign, json=True),
    "form": Target(_form),
    "gguf": Target(_gguf),
    "http": Target(_http_body, json=True),
    "manifest": Target(_manifest, json=True),
    "protobuf": Target(_protobuf),
    "recipe": Target(_recipe),
    "reference": Target(_reference),
    "report": Target(_report, json=True),
    "safetensors": Target(_safetensors),
    "sentencepiece": Target(_sentencepiece),
    "tekken": Target(_tekken, json=True),
    "template": Target(_template),
    "tokenizer": Target(_tokenizer, json=True),
}


def runner(name: str) -> Callable[[bytes], None]:
    """Return what runs one input of a target: it returns where the parser returned or refused, and raises
    anything else.
    """
    run = TARGETS[name].make()

    def one(data: bytes) -> None:
        try:
            run(data)
        except LlorchError:
            return

    return one
