"""Ranking documents by how likely a model says "yes": Qwen3-Reranker's way.

The model is asked whether a document meets the requirements of a query, in the words that it was trained on,
and of the two answers that it knows, the share of "yes" is the document's relevance. The words go through the
model's own chat template, so that no document can write control tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from llorch_serve.config import AUTO
from llorch_serve.errors import FieldViolation, InvalidRequestError, UsageError
from llorch_serve.requests import ChatMessage, ChatPrompt, ContinuationScore, RankRequest
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.scoring import MAX_SCORED_CHARS, ScoredPair

MAX_DOCUMENTS: Final = 256

QWEN3: Final = "qwen3"
NONE: Final = "none"
NAMES: Final = (AUTO, QWEN3, NONE)

DEFAULT_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
_QUESTION: Final = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_RENDERED: Final = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""What the model was trained on, as its card has it."""

_MAX_NAMED: Final = 32  # bad documents that are named one by one
_PROBE_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Ranking:
    """How a model is asked. yes, no: the tokens of its two answers."""

    prompts: PromptEncoder
    yes: int
    no: int

    def pairs(self, request: RankRequest, *, context: int) -> tuple[ScoredPair, ...]:
        """Return two pairs for each document: what it is asked, with either answer.

        context: most tokens of a question. Raises InvalidRequestError with every bad field.
        """
        count = len(request.documents)
        if not 1 <= count <= MAX_DOCUMENTS:
            found = f"found {count} documents, expected 1 to {MAX_DOCUMENTS}"
            raise InvalidRequestError([FieldViolation("documents", found)])
        instruction = DEFAULT_INSTRUCTION if request.instruction is None else request.instruction
        _check_chars(instruction, request)
        found_pairs: list[ScoredPair] = []
        bad: list[FieldViolation] = []
        for index, document in enumerate(request.documents):
            prompt = _question(instruction, request.query, document)
            try:
                ids, _ = self.prompts.encode(prompt, context=context)
            except InvalidRequestError as error:
                bad += [FieldViolation(f"documents[{index}]", each.description) for each in error.violations]
            else:
                if len(ids) > context:
                    problem = (
                        f"found {len(ids)} tokens with the query and what is asked of them; the context "
                        f"holds {context}; send less"
                    )
                    bad.append(FieldViolation(f"documents[{index}]", problem))
                found_pairs += [ScoredPair(ids, (answer,)) for answer in (self.yes, self.no)]
            if len(bad) >= _MAX_NAMED:
                break
        if bad:
            raise InvalidRequestError(bad)
        return tuple(found_pairs)


def relevance(yes: ContinuationScore, no: ContinuationScore) -> float:
    """Return the share of "yes" among the two answers, 0 to 1."""
    return 1 / (1 + math.exp(min(no.logprob - yes.logprob, 700.0)))


def choose_ranking(name: str, prompts: PromptEncoder, model_id: str) -> Ranking | None:
    """Return how a model ranks; None: it does not.

    name: one of NAMES; ``auto`` is for models whose name says that they rank.
    Raises UsageError for another name, or where the model cannot be asked so.
    """
    if name not in NAMES:
        raise UsageError(f"--rank-format is {name!r}; expected one of {', '.join(NAMES)}")
    if name == NONE or (name == AUTO and "rerank" not in model_id.lower()):
        return None
    problem = _problem(prompts)
    if problem is None:
        (yes,), (no,) = (prompts.tokenizer.encode(text, add_special_tokens=False) for text in ("yes", "no"))
        return Ranking(prompts, yes, no)
    if name == AUTO:
        return None
    raise UsageError(f"--rank-format {name} with {model_id}: {problem}; leave it out")


def _check_chars(instruction: str, request: RankRequest) -> None:
    """Raise InvalidRequestError where the texts are too long to be read as often as it takes: instruction and
    query with each document.
    """
    documents = request.documents
    found = (len(instruction) + len(request.query)) * len(documents) + sum(map(len, documents))
    if found > MAX_SCORED_CHARS:
        problem = (
            f"found {found} characters, the query's and the instruction's with each of {len(documents)} "
            f"documents; expected at most {MAX_SCORED_CHARS}; send fewer documents, or shorter texts"
        )
        raise InvalidRequestError([FieldViolation("documents", problem)])


def _question(instruction: str, query: str, document: str) -> ChatPrompt:
    question = _QUESTION.format(instruction=instruction, query=query, document=document)
    messages = (ChatMessage("system", _SYSTEM), ChatMessage("user", question))
    return ChatPrompt(messages, template_arguments='{"enable_thinking": false}')


def _problem(prompts: PromptEncoder) -> str | None:
    """Return why a model cannot be asked; None if it can."""
    for answer in ("yes", "no"):
        if len(prompts.tokenizer.encode(answer, add_special_tokens=False)) != 1:
            return f'"{answer}" is no single token of its vocabulary, so that its probability is not known'
    if not prompts.has_template:
        return "it has no chat template"
    probe = ("A task", "a query", "a document")
    try:
        _, rendered = prompts.encode(_question(*probe), context=_PROBE_TOKENS)
    except InvalidRequestError as error:
        return f"its chat template does not take the question ({error})"
    question = _QUESTION.format(instruction=probe[0], query=probe[1], document=probe[2])
    if rendered != _RENDERED.format(system=_SYSTEM, question=question):
        return "its chat template writes the question otherwise than Qwen3-Reranker was trained on"
    return None
