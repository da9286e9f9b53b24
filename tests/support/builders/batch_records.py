"""Records of files and batches, without a front."""

from __future__ import annotations

from typing import Any

from llorch_serve.http.batches.records import BatchRecord, FileRecord, new_batch_id, new_file_id
from llorch_serve.http.batches.store import Store


def kept_file(store: Store, content: bytes, owner: str = "", purpose: str = "batch") -> FileRecord:
    """Keep a file."""
    place, file = store.folder.new_upload()
    with file:
        file.write(content)
    store.take(owner, len(content))
    try:
        return store.keep_upload(place, len(content), owner, "asked.jsonl", purpose, None)
    except OSError:
        store.give_back(owner, len(content))
        raise


def batch_record(file: FileRecord, **fields: Any) -> BatchRecord:
    """Return a batch of a file."""
    usual: dict[str, Any] = {
        "id": new_batch_id(),
        "owner": file.owner,
        "number": 0,
        "endpoint": "/v1/chat/completions",
        "input_file_id": file.id,
        "completion_window": "24h",
        "seconds": 86_400,
        "created_at": file.created_at,
        "output_file_id": new_file_id(),
        "error_file_id": new_file_id(),
    }
    return BatchRecord(**usual | fields)
