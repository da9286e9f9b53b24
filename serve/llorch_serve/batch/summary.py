"""What a batch has done, while it runs and at its end."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llorch_serve.batch.answering import Usage


@dataclass(frozen=True, slots=True)
class Summary:
    """What has been done so far, of which the disk was told.

    lines: of the input. answered, failed: by this run and earlier ones; answered_before, failed_before: by
    earlier ones. Tokens are of this run alone; cached_tokens are those of prompts that were not computed
    again. tokens_planned, tokens_done: by estimate, of what this run has to do. seconds: since it began.
    """

    lines: int
    answered: int = 0
    failed: int = 0
    answered_before: int = 0
    failed_before: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokens_planned: int = 0
    tokens_done: int = 0
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Every line has its answer, or its failure."""
        return self.answered + self.failed == self.lines

    @property
    def lines_per_s(self) -> float | None:
        """The rate of this run; None before it can be told."""
        done = self.answered + self.failed - self.answered_before - self.failed_before
        return done / self.seconds if done and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the rate of tokens so far; None before it can be told."""
        if not self.tokens_done or not self.seconds:
            return 0.0 if self.is_complete else None
        return self.seconds * max(0, self.tokens_planned - self.tokens_done) / self.tokens_done

    def with_line(self, *, is_failure: bool, usage: Usage, tokens: int, seconds: float) -> Summary:
        """Return the summary with one more line. tokens: its estimate."""
        return replace(
            self,
            answered=self.answered + (not is_failure),
            failed=self.failed + is_failure,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            tokens_done=self.tokens_done + tokens,
            seconds=seconds,
        )
