"""Answer ``llorch verify``: whether, and by how much, an artifact differs from the trained model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.hub.reference import with_revision
from llorch_serve.terminal.console import byte_progress, say, write, write_json
from llorch_serve.terminal.groups import FlagGroup, composed
from llorch_serve.terminal.requirements import required

if TYPE_CHECKING:
    from llorch_export.adapter.choice import AdapterChoice
    from llorch_export.verify.divergence import Verification
    from llorch_serve.fidelity.reference_file import Fidelity


class ProofFlags(FlagGroup, frozen=True):
    """What an artifact is compared with, and how closely."""

    against: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The checkpoint it was exported from.", show_default=False),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV",
            help="Where SOURCE is a hub id: a branch, a tag or a commit of it, as in org/name@REV.",
            show_default=False,
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR[=WEIGHT]",
            help="A PEFT folder that was merged into it; may be repeated.",
            show_default=False,
        ),
    ] = None
    layers: Annotated[
        bool,
        typer.Option(
            "--layers", help="Compare every stage of a forward pass, and name the first that departs."
        ),
    ] = False
    llama_cpp: Annotated[
        bool,
        typer.Option(
            "--llama-cpp",
            help="With --layers and a GGUF file: compare logits with llama.cpp's too (llama-cpp-python).",
        ),
    ] = False
    write_reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the reference's log-probabilities at 256 positions (2 bytes for each token of the "
            "vocabulary).",
            show_default=False,
        ),
    ] = None
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with a kept reference instead of SOURCE; needs neither torch nor transformers.",
            show_default=False,
        ),
    ] = None

    def check(self) -> None:
        """Raise UsageError for flags that do not go together."""
        if (self.against is None) == (self.reference is None):
            given = "neither" if self.against is None else "both"
            raise UsageError(f"{given} of --against SOURCE and --reference FILE given; expected one of them")
        for flag in self.given():
            if self.reference is not None and flag in (
                "--revision",
                "--lora",
                "--layers",
                "--write-reference",
            ):
                raise UsageError(
                    f"{flag} needs --against SOURCE; a reference file holds log-probabilities alone"
                )
        if self.llama_cpp and not self.layers:
            raise UsageError("--llama-cpp has no effect without --layers; give both")
        if self.layers and self.write_reference is not None:
            raise UsageError("--write-reference has no effect with --layers; give them in two calls")


@composed
def command(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder.", show_default=False)],
    proof: ProofFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Compare an artifact's logits with the source's own, computed by transformers in fp32.

    Prints the mean KL divergence in nats, the share of equal likeliest tokens and the largest difference of
    logits. Exits with 1 if the divergence is beyond the recipe's limit.

    With --layers: embedding, norms, RoPE, attention, SwiGLU, blocks, logits and 32 greedy tokens, each with
    its tolerance. fp32: largest difference over the position's largest magnitude, 1e-5 for norms and RoPE,
    1e-4 for the rest, 1e-3 absolute for logits. Half precision and quantised: norm of the difference over
    norm of the reference.

    For example:

        llorch verify artifacts/smollm2 --against SmolLM2-135M-Instruct.gguf

        llorch verify artifacts/smollm2 --against SmolLM2-135M-Instruct.gguf --layers

        llorch verify artifacts/smollm2 --reference smollm2.reference

    """
    proof.check()
    if not _passes(artifact, proof, as_json=as_json):
        raise typer.Exit(1)


def _passes(artifact: Path, proof: ProofFlags, *, as_json: bool) -> bool:
    """Compare the artifact with what the flags name, print it and return whether it is within limits."""
    if proof.reference is not None:
        return _against_file(artifact, proof.reference, as_json=as_json)
    assert proof.against is not None, "checked with the flags"
    against = with_revision(proof.against, proof.revision)
    _require_libraries()
    from llorch_export.adapter.choice import parse_choices

    lora = parse_choices(proof.lora or ())
    if proof.layers:
        from llorch_export.terminal.layers import show_layers

        return show_layers(artifact, against, lora=lora, llama_cpp=proof.llama_cpp, as_json=as_json)
    return _against_source(artifact, against, lora, proof.write_reference, as_json=as_json)


def _require_libraries() -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own progress bars; read when tqdm is imported
    with required("export"):
        import llorch_export.source.open  # noqa: F401 - fails here, with the line to install it
    with required("reference"):
        import torch  # noqa: F401 - as above
        import transformers  # noqa: F401 - as above


def _against_source(
    artifact: Path, against: str, lora: tuple[AdapterChoice, ...], keep: Path | None, *, as_json: bool
) -> bool:
    from llorch_export.verify.divergence import verify
    from llorch_serve.artifact.folder import is_artifact, load_artifact

    if is_artifact(artifact) and load_artifact(artifact).manifest.embeds is not None:
        if keep is not None:
            raise UsageError(
                f"--write-reference keeps log-probabilities, and {artifact} embeds texts; leave it out"
            )
        return _embeddings_against_source(artifact, against, lora, as_json=as_json)
    with byte_progress() as progress:
        result = verify(artifact, against, progress, lora=lora, keep=keep)
    if not result.same_source:
        say(f"note: {artifact} was exported from other files than {against}")
    return _show(result, "difference", as_json=as_json)


def _embeddings_against_source(
    artifact: Path, against: str, lora: tuple[AdapterChoice, ...], *, as_json: bool
) -> bool:
    from llorch_export.verify.embeddings import verify_embeddings

    with byte_progress() as progress:
        result = verify_embeddings(artifact, against, progress, lora=lora)
    if not result.same_source:
        say(f"note: {artifact} was exported from other files than {against}")
    if as_json:
        write_json(result)
    else:
        write(
            f"cosine {result.cosine:.7f}, lowest {result.lowest_cosine:.7f} (limit {result.limit:g}), "
            f"largest error {result.largest_error:.2g}, {result.texts} texts of {result.tokens} tokens of "
            f"{result.text} text\nagainst {result.oracle}\n"
        )
    if not result.passed:
        say(f"error: the lowest cosine {result.lowest_cosine:.7f} is below the limit {result.limit:g}")
    return result.passed


def _against_file(artifact: Path, path: Path, *, as_json: bool) -> bool:
    from llorch_serve.artifact.folder import load_artifact
    from llorch_serve.fidelity.judging import SLOTS
    from llorch_serve.fidelity.reference_file import check_reference, divergence, read_reference
    from llorch_serve.loading.models import open_artifact

    kept, loaded = read_reference(path), load_artifact(artifact)
    check_reference(kept, loaded)
    config = SessionConfig(slots=SLOTS, max_context=max(len(kept.header.token_ids), 2))
    result = divergence(open_artifact(loaded, config, lambda report: None), kept)
    if not result.same_source:
        say(f"note: {artifact} was exported from other files than {path} was written from")
    return _show(result, "difference of log-probabilities", as_json=as_json)


def _show(result: Verification | Fidelity, difference: str, *, as_json: bool) -> bool:
    if as_json:
        write_json(result)
    else:
        write(
            f"KL {result.kl:.3g} nats (limit {result.limit:g}), top-1 {result.top1:.2%}, largest "
            f"{difference} "
            f"{result.max_abs:.3g}, {result.tokens} tokens of {result.text} text\nagainst {result.oracle}\n"
        )
        if result.prefill_kl is not None and result.decode_kl is not None:
            write(
                f"KL of the graph for prompts {result.prefill_kl:.3g}, of the one for answers "
                f"{result.decode_kl:.3g}\n"
            )
    if not result.passed:
        say(f"error: the divergence {result.kl:.3g} is beyond the recipe's limit {result.limit:g}")
    return result.passed
