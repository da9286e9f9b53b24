"""The part of ``llorch bench`` that starts streams together on a running worker."""

from __future__ import annotations

from collections.abc import Sequence

from llorch_serve.bench.measure import RemoteBackend, measure
from llorch_serve.bench.offline import speeds, summarise
from llorch_serve.bench.schema import Report, Row, ServingTest
from llorch_serve.bench.worker_report import report_on_worker
from llorch_serve.bench.workload import Workload, text_prompt
from llorch_serve.client.channel import Access
from llorch_serve.errors import UsageError
from llorch_serve.terminal.access import connected
from llorch_serve.terminal.bench_flags import LengthFlags
from llorch_serve.terminal.console import say, step_progress


def measure_streams(
    address: str,
    access: Access,
    wait: float | None,
    lengths: LengthFlags,
    counts: Sequence[int],
    repeat: int,
) -> Report:
    """Measure the worker at ``address`` with each of ``counts`` streams, ``repeat`` times after a warm-up.

    Raises UsageError if its context does not suffice, WorkerError if it cannot be reached.
    """
    given = lengths.read()
    with connected(address, access, wait) as client:
        info = client.model_info()
        if max(counts) > info.slots:
            say(
                f"note: the worker has {info.slots} slots; of {max(counts)} streams the others wait their "
                f"turn"
            )
        ids = text_prompt(lengths.tokens, client.tokenize) if given is None else given
        work = Workload(ids, lengths.max_tokens, info.vocab_size)
        check_context(len(ids), lengths.max_tokens, info.context_length)
        rows = []
        with step_progress("measuring", len(counts) * (repeat + 1)) as advance:
            for count in counts:
                backend = RemoteBackend(client.generate)
                runs = measure(backend, work, count, repeat=repeat, progress=advance)
                test = ServingTest(
                    arrivals="together",
                    prompt_tokens=len(ids),
                    generated_tokens=lengths.max_tokens,
                    concurrency=count,
                )
                rows.append(Row(test=test, figures=summarise([speeds(run) for run in runs])))
    return report_on_worker(info, rows, repeat)


def check_context(prompt: int, answer: int, context: int) -> None:
    """Raise UsageError for more tokens of prompt and answer than a worker's context holds."""
    if prompt + answer > context:
        raise UsageError(
            f"{prompt} prompt tokens and {answer} generated ones need a context of {prompt + answer}; "
            f"this one has {context}. Choose fewer tokens."
        )
