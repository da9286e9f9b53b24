"""Vectors of texts: how near they are to transformers' pooled states, and how fast they come.

    ci/measurement embeddings SOURCE [--texts 500] [--pooling last] [--seconds 2] [--output FILE.json]

SOURCE is exported in fp32, by the default recipe and in int8. Fidelity: the cosine of each text's vector with
the reference's, over pieces of English and of other scripts, 1 to 400 tokens long. Exits with 1 if one text's
cosine is below 0.99999 (fp32) or 0.999 (default recipe); int8 is shown for comparison.

Speed, in tokens and texts per second by length of text: in batches as the engine makes them, one by one, in
batches in int8, and the same texts as prompts of the same checkpoint's default export, on the path of
generation. These take turns of ``--seconds`` each, and the ratios are of one round. Means something on a
machine with nothing else to do, where all of it takes minutes for a model of 135 million parameters.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
import typer

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.recipes.default import unasked_recipe
from llorch_export.recipes.file import with_recipes
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.embeddings import compared, pooled_reference
from llorch_export.verify.reference import Reference
from llorch_serve.artifact.folder import Artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.config import SessionConfig
from llorch_serve.engine.embedding import BATCH_TOKENS
from llorch_serve.loading.models import open_artifact
from llorch_serve.runtime.embedding_session import EmbeddingSession, open_embedder
from llorch_serve.runtime.session import DecoderSession
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.multilingual import multilingual_texts

ASKED: Final = {"fp32": 0.99999, "default": 0.999}
"""The lowest cosine that any text may have."""

LENGTHS: Final = (16, 64, 256)
_LONGEST: Final = 400
_CHUNK: Final = 256  # tokens, of a prompt on the path of generation
_ROUNDS: Final = 3

Ids = list[int]
Way = Callable[[Sequence[Ids]], None]
"""Runs texts of one length."""


def exported(source: str, output: Path, **given: Any) -> Artifact:
    """Export as ``llorch export`` does where these options are given."""
    options = ExportOptions(source, output, **given)
    return export(with_recipes(options, unasked_recipe(options), None), lambda *_: None).artifact


def texts_of(artifact: Artifact, count: int) -> list[Ids]:
    """Return pieces of texts of many lengths and scripts as token ids."""
    tokenizer, rng = Tokenizer.load(artifact.tokenizer_path), np.random.default_rng(0)
    english, others = sample_text(), multilingual_texts(count)
    found: list[Ids] = []
    while len(found) < count:
        size = int(np.exp(rng.uniform(np.log(4), np.log(4 * _LONGEST))))
        start = int(rng.integers(0, max(1, len(english) - size)))
        text = english[start : start + size] if len(found) % 2 else next(others)
        ids = tokenizer.encode(text, add_special_tokens=True)[:_LONGEST]
        if ids:
            found.append(list(ids))
    return found


def fidelity(
    artifact: Artifact, texts: Sequence[Ids], expected: Mapping[tuple[int, ...], npt.NDArray[np.float64]]
) -> dict[str, float]:
    """Return the figures of one artifact's cosines with the expected vectors."""
    session = open_embedder(artifact, SessionConfig(), lambda _: None)
    cosines, errors = compared(session, texts, lambda text: expected[tuple(text)])
    return {
        "mean": float(cosines.mean()),
        "1st percentile": float(np.percentile(cosines, 1)),
        "lowest": float(cosines.min()),
        "below 0.999": float((cosines < ASKED["default"]).mean()),
        "largest_error": float(errors.max()),
    }


def fidelities(
    artifacts: Mapping[str, Artifact], texts: Sequence[Ids], reference: Reference
) -> dict[str, dict[str, float]]:
    """Return each artifact's figures; those of equal artifacts are measured once."""
    form = artifacts["default"].manifest.embeds
    assert form is not None, "it was exported to embed texts"
    expected = {tuple(text): pooled_reference(reference, text, form) for text in texts}
    found: dict[str, dict[str, float]] = {}
    near = {}
    for name, artifact in artifacts.items():
        made = artifact.manifest.fingerprint
        if made not in found:
            found[made] = fidelity(artifact, texts, expected)
        near[name] = found[made]
        typer.echo(f"{name:8} cosine over {len(texts)} texts: {near[name]}")
    return near


def short_of(near: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the forms that have a text below what is asked."""
    return [name for name, least in ASKED.items() if near[name]["lowest"] < least]


def batched(session: EmbeddingSession, texts: Sequence[Ids]) -> None:
    """Embed texts of one length in batches."""
    step = max(1, BATCH_TOKENS // len(texts[0]))
    for start in range(0, len(texts), step):
        session.embed(texts[start : start + step])


def one_by_one(session: EmbeddingSession, texts: Sequence[Ids]) -> None:
    """Embed texts in a call each."""
    for text in texts:
        session.embed([text])


def prompts(session: DecoderSession, texts: Sequence[Ids]) -> None:
    """Run texts as prompts, as answers to them would begin."""
    for text in texts:
        for start in range(0, len(text), _CHUNK):
            session.prefill(0, text[start : start + _CHUNK], start)


def speeds(ways: dict[str, Way], vocabulary: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Give each length's tokens per second by way, the median of rounds, and ratios within a round."""
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        count = BATCH_TOKENS // length
        texts = rng.integers(0, vocabulary, (count, length)).tolist()
        rounds: list[dict[str, float]] = []
        for _ in range(_ROUNDS):
            found = {}
            for name, way in ways.items():
                way(texts[:1])
                start, done = time.perf_counter(), 0
                while (spent := time.perf_counter() - start) < seconds:
                    way(texts)
                    done += count
                found[name] = done * length / spent
            rounds.append(found)
        plain = {name: statistics.median(each[name] for each in rounds) for name in ways}
        ratios = {
            name: statistics.median(each["batched"] / each[name] for each in rounds)
            for name in ways
            if name != "batched"
        }
        yield {"tokens": length, "tokens_per_s": plain, "batched_over": ratios}


def main(
    source: Annotated[str, typer.Argument(help="GGUF file or folder.")],
    texts: Annotated[int, typer.Option(help="Texts whose vectors are compared.")] = 500,
    pooling: Annotated[Literal["last", "mean"], typer.Option()] = "last",
    seconds: Annotated[float, typer.Option(help="Of each way in each round.")] = 2.0,
    output: Annotated[Path | None, typer.Option(help="Where the figures go, as JSON.")] = None,
) -> None:
    """Print the figures of one source."""
    with tempfile.TemporaryDirectory(prefix="llorch-embeddings-") as folder:
        place = Path(folder)
        artifacts = {
            "fp32": exported(source, place / "fp32", embed=pooling, precision="fp32"),
            "default": exported(source, place / "default", embed=pooling),
            "int8": exported(source, place / "int8", embed=pooling, precision="int8"),
        }
        near = fidelities(
            artifacts,
            texts_of(artifacts["fp32"], texts),
            Reference(open_checkpoint(source, pooling)),
        )
        embedder = open_embedder(artifacts["default"], SessionConfig(), lambda _: None)
        coarse = open_embedder(artifacts["int8"], SessionConfig(), lambda _: None)
        generating = exported(source, place / "generating", embed="none")
        decoder = open_artifact(generating, SessionConfig(slots=1, max_context=2 * _CHUNK), lambda _: None)
        assert isinstance(decoder, DecoderSession), "the CPU's graphs have no fixed shapes"
        ways = {
            "batched": lambda ids: batched(embedder, ids),
            "one by one": lambda ids: one_by_one(embedder, ids),
            "batched in int8": lambda ids: batched(coarse, ids),
            "prompts of the generation path": lambda ids: prompts(decoder, ids),
        }
        fast = []
        for row in speeds(ways, generating.manifest.model.vocab_size, seconds):
            fast.append(row)
            typer.echo(json.dumps(row))
    if output is not None:
        output.write_text(json.dumps({"source": source, "pooling": pooling, "fidelity": near, "speed": fast}))
    if short_of(near):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
