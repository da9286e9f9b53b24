"""The tokenizers library's pool of threads, which is not wanted. Nothing of the library is imported here."""

from __future__ import annotations

import os


def leave_threads_alone() -> None:
    """Keep the library from making a pool of threads.

    Its batches are used for one text each, to be free of the lock; a pool would have nothing to do. As this
    changes the environment, it comes before whatever reads that on another thread.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
