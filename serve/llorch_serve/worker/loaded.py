"""What every loaded model has, whether it generates or embeds: its tokenizer, its description and
the requests that have not ended.

:class:`llorch_serve.worker.worker.Worker` and
:class:`llorch_serve.worker.embedding_worker.EmbeddingWorker` add what they are asked for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace

from llorch_serve.errors import EngineStoppedError
from llorch_serve.providers import Placement
from llorch_serve.requests import ModelInfo
from llorch_serve.worker.live_requests import LiveRequests
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.served import ServedModel
from llorch_serve.worker.texts import TextMethods


class LoadedModel(TextMethods):
    """Base of the workers.

    context: most tokens of a sequence. served_names: see :class:`llorch_serve.config.EngineConfig`.
    """

    _requests: LiveRequests

    def __init__(
        self,
        artifact: ServedModel,
        prompts: PromptEncoder,
        placement: Placement,
        *,
        context: int,
        served_names: tuple[str, ...],
    ) -> None:
        super().__init__(prompts, context=context)
        self.artifact = artifact
        self._placement = placement
        self._served_names = served_names

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Have ``tell`` called on the engine's thread if the engine stops after an error; at once if it
        has.
        """
        self._requests.when_dead(tell)

    def info(
        self,
        *,
        slots: int,
        batch_invariant: bool,
        limits: tuple[str, ...],
        capabilities: tuple[str, ...],
        embedding_size: int = 0,
    ) -> ModelInfo:
        """Describe what is served; see :class:`llorch_serve.requests.ModelInfo` for the fields."""
        manifest, recipe, where = self.artifact.manifest, self.artifact.manifest.recipe, self._placement
        return ModelInfo(
            model_id=manifest.model_id,
            fingerprint=manifest.fingerprint,
            context_length=self._context,
            vocab_size=manifest.model.vocab_size,
            precision=recipe.precision,
            head_precision=recipe.head_precision,
            provider=where.provider,
            provider_node_share=where.node_share,
            slots=slots,
            has_chat_template=self._prompts.has_template,
            stop_token_ids=manifest.stop_token_ids,
            version=importlib.metadata.version("llorch"),
            batch_invariant=batch_invariant,
            kind=self.artifact.kind.value,
            limits=limits,
            provider_shares=tuple(replace(share, operators=()) for share in where.shares),
            device=where.device,
            served_names=self._served_names,
            embedding_size=embedding_size,
            capabilities=capabilities,
        )
