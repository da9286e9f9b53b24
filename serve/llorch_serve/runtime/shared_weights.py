"""Packed weights in a file, which all processes of this machine map instead of packing a copy each.

Input: an artifact and the graphs that are to be loaded. Output: a folder of the user's cache with the same
graphs, whose weights lie in one file as the runtime has packed them for this CPU (``weights_packing.py``
makes it). What is there is taken only if it was made of the same files by the same runtime on the same CPU,
is as it was written, and if nobody else can have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.lock import BeingWrittenError, exclusive
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import ResourceError, UsageError
from llorch_serve.files.cache import cache_folder
from llorch_serve.files.durable import write_whole
from llorch_serve.files.private import NotPrivateError, check_private, make_private
from llorch_serve.providers import byte_settings
from llorch_serve.python_child import child_environment, module_command

MOST_BYTES: Final = 64 * 2**30
"""What all entries may take together; those that were not used for the longest time are removed beyond it."""

_FORMAT: Final = 1  # of entries; another makes them anew
_RECORD: Final = "entry.json"
_MAX_RECORD_BYTES: Final = 2**16
_TIMES: Final = 4
"""Times an artifact's bytes that making an entry takes for a moment; it keeps half of that."""
_PATIENCE_S: Final = 600.0  # for another process that is packing
_LOOK_S: Final = 0.2
_CPU_INFO: Final = Path("/proc/cpuinfo")

logger = logging.getLogger(__name__)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it was written: its size, and the time of the last change, in ns."""

    bytes: int
    changed: int


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an entry's folder holds. model: for people."""

    model: str
    files: dict[str, _File]


class PackingOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be packed: an artifact's graphs by name, with their recipes, into an empty folder."""

    artifact: str
    graphs: dict[str, Recipe]
    folder: str
    threads: int


@dataclass(frozen=True, slots=True)
class SharedGraphs:
    """Where graphs are loaded from. notice: why they are not shared after all; None: they are."""

    folder: Path
    notice: str | None = None


def lacking() -> str | None:
    """Return why weights cannot be shared here, or None."""
    return None if hasattr(os, "geteuid") else f"found {sys.platform}, expected Linux or macOS"


def shared_graphs(
    artifact: Artifact, graphs: Mapping[str, Recipe], runtime: Any, threads: int
) -> SharedGraphs:
    """Return the folder to load graphs from, which is made if it is not there.

    graphs: by name, with their recipes. Where packing fails, or takes more disk than there is, the folder is
    the artifact's own, and the notice says why.
    Raises UsageError where the cache's folder is another's or can be written by others.
    """
    if (lack := lacking()) is not None:
        raise UsageError(f"--share-weights: {lack}; leave it out")
    root = cache_folder() / "weights"
    name = _key(artifact, graphs, runtime)
    try:
        make_private(root)
        with _alone(root):
            for left in root.glob(".making-*"):  # by a process that was killed, as this one holds the cache
                shutil.rmtree(left, ignore_errors=True)
            if not _usable(root / name):
                _make(root, name, artifact, graphs, threads)
            os.utime(root / name / _RECORD)  # used now
    except NotPrivateError as error:
        raise UsageError(f"--share-weights: {error}") from error
    except (ResourceError, OSError) as error:
        return SharedGraphs(artifact.folder, f"weights are not shared: {error}")
    return SharedGraphs(root / name)


def _key(artifact: Artifact, graphs: Mapping[str, Recipe], runtime: Any) -> str:
    """Return the name of an entry: a hash of all that decides its bytes."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
        flags = "\n".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        )
    made_of = {
        "format": _FORMAT,
        "files": sorted((entry.path, entry.sha256) for entry in artifact.manifest.files),
        "graphs": sorted(graphs),
        "runtime": [runtime.__version__, runtime.get_build_info()],
        "cpu": [platform.system(), platform.machine(), platform.processor(), flags],
        "settings": byte_settings(),
    }
    return hashlib.sha256(msgspec.json.encode(made_of)).hexdigest()[:32]


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the cache, waiting for a process that has it. Raises ResourceError if that takes too long."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with exclusive(root / "all"):
                yield
                return
        except BeingWrittenError:
            if time.monotonic() > end:
                raise ResourceError(f"another process has been packing into {root} for long") from None
            time.sleep(_LOOK_S)


def _usable(entry: Path) -> bool:
    """Tell whether an entry is there, and as it was written; one that is not is removed.

    Raises NotPrivateError for one that is another's, or that others can write.
    """
    try:
        check_private(entry)
        if check_private(entry / _RECORD, folder=False).st_size > _MAX_RECORD_BYTES:
            raise ValueError(_RECORD)
        record = msgspec.json.decode((entry / _RECORD).read_bytes(), type=_Record)
        for name, file in record.files.items():
            if file != _status(entry / name):
                raise ValueError(name)
        if {path.name for path in entry.iterdir()} != {*record.files, _RECORD}:
            raise ValueError("another file")
    except FileNotFoundError:
        pass
    except (ValueError, msgspec.MsgspecError) as error:
        logger.warning("%s is not as it was written (%s); it is made anew", entry, error)
    else:
        return True
    if entry.exists():
        shutil.rmtree(entry)
    return False


def _status(path: Path) -> _File:
    found = check_private(path, folder=False)
    return _File(found.st_size, found.st_mtime_ns)


def _make(root: Path, name: str, artifact: Artifact, graphs: Mapping[str, Recipe], threads: int) -> None:
    """Make an entry. Raises ResourceError if there is too little disk, or packing fails."""
    needed = _TIMES * sum(entry.bytes for entry in artifact.manifest.files)
    if needed // 2 > MOST_BYTES:
        raise ResourceError(f"they would take {_gib(needed // 2)}; expected at most {_gib(MOST_BYTES)}")
    if (free := shutil.disk_usage(root).free) < needed:
        raise ResourceError(
            f"{root} has {_gib(free)} free and packing takes up to {_gib(needed)} for a moment; free some, "
            "or set LLORCH_CACHE to another folder"
        )
    began = time.perf_counter()
    logger.info("packing the weights of %s into %s", artifact.manifest.model_id, root / name)
    unfinished = root / f".making-{secrets.token_hex(8)}"
    unfinished.mkdir(mode=0o700)
    try:
        _run(
            PackingOrder(
                artifact=str(artifact.folder.resolve()),
                graphs=dict(graphs),
                folder=str(unfinished),
                threads=threads,
            )
        )
        files = {path.name: _status(path) for path in unfinished.iterdir()}
        record = _Record(artifact.manifest.model_id, files)
        write_whole(unfinished / _RECORD, msgspec.json.encode(record))
        unfinished.rename(root / name)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    logger.info("packed in %.1f s", time.perf_counter() - began)
    _bound(root, keep=name)


def _run(order: PackingOrder) -> None:
    command = module_command(sys.executable, "llorch_serve.runtime.weights_packing")
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=child_environment(),
    ) as packer:
        assert packer.stdin is not None
        assert packer.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
            # The pipe stays open, since the process ends when it is closed, as every end of this one does.
            packer.stdin.write(msgspec.json.encode(order) + b"\n")
            packer.stdin.flush()
        said = packer.stderr.read()
        code = packer.wait()
    if code:
        last = said.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ResourceError(f"packing failed: {last[0][:500] if last else f'exit {code}'}")


def _bound(root: Path, *, keep: str) -> None:
    """Remove the entries that were not used for the longest time until the rest may stay."""
    used: list[tuple[int, int, Path]] = []
    for entry in root.iterdir():
        with contextlib.suppress(OSError):
            size = sum(path.lstat().st_size for path in entry.iterdir())
            used.append(((entry / _RECORD).lstat().st_mtime_ns, size, entry))
    total = sum(size for _, size, _ in used)
    for _, size, entry in sorted(used):
        if total > MOST_BYTES and entry.name != keep:
            logger.info("%s is removed, since all entries may take %s", entry, _gib(MOST_BYTES))
            # Processes that have mapped its file keep what they have mapped.
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
