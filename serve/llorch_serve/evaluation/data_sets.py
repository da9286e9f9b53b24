"""Where tasks' data sets come from: a folder given on the command line first, then the hub or its cache.

lm-eval has no option for it, so ``datasets.load_dataset``, which it and tasks call, is another function while
tasks are made. Needs ``datasets``; ``tasks.py`` imports this module when tasks are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

import datasets

from llorch_serve.errors import HubError
from llorch_serve.hub.credentials import hide_credentials

_PATIENCE_S: Final = 10.0  # for the hub's first answer


@dataclass(slots=True)
class DataSets:
    """folders: of ``--task-folder``. wanted: the data set that was asked for last, and its configuration;
    files: what it is to be made of, where a task names that itself.
    unreached: why the hub cannot be asked; None: it answers, or has not been asked.
    """

    folders: Sequence[Path]
    wanted: tuple[str, str | None] | None = field(default=None, init=False)
    files: object = field(default=None, init=False)
    unreached: Exception | None = field(default=None, init=False)
    _asked: bool = field(default=False, init=False)

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Have tasks that are made inside find their data in the folders."""
        load = datasets.load_dataset

        def load_dataset(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
            self.wanted, self.files = (path, name), options.get("data_files")
            if (folder := self._folder(path)) is not None:
                path = str(folder)
            elif "/" in path or not options.keys() & {"data_files", "data_dir"}:
                self._ask_hub(path)
            for option in ("data_files", "data_dir"):
                if option in options:
                    options[option] = self._local(options[option])
            with _cache_alone() if self.unreached is not None else contextlib.nullcontext():
                return load(path, name, *args, **options)

        datasets.load_dataset = load_dataset
        try:
            yield
        finally:
            datasets.load_dataset = load

    def missing(self, task: str, error: BaseException) -> HubError:
        """Return the error for a task whose data set is not there."""
        name, part = self.wanted or (task, None)
        of = f" ({part})" if part else ""
        reason = hide_credentials(" ".join(str(self.unreached or error).split()))[:300]
        if self.files is not None:
            return HubError(
                f"the task {task} reads {self.files}, which cannot be read: {reason}; put it into the folder "
                f"of --task-folder, under the name that the task has for it"
            )
        return HubError(
            f"the task {task} needs the data set {name}{of}, which is not on this machine and could not be "
            f"fetched: {reason}; where there is a hub, run: hf download --repo-type dataset {name} "
            f"--local-dir DIR/{name}, copy DIR here, and give --task-folder DIR"
        )

    def _ask_hub(self, path: str) -> None:
        """Find out whether there is a hub, once: what fetches a data set would ask six times, with pauses of
        up to 8 s.
        """
        if self._asked or datasets.config.HF_HUB_OFFLINE or Path(path).exists():
            return
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        # The root of the HTTP library's errors, whichever library the installed client is built on.
        transport: type[Exception] = HfHubHTTPError.__bases__[0]
        self._asked = True
        try:
            HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(path, timeout=_PATIENCE_S)
        except HfHubHTTPError:
            return  # it answers; what is wrong with the data set is told when that is fetched
        except ValueError:
            return  # no possible name, which is told there too
        except (transport, OSError) as error:
            self.unreached = error

    def _folder(self, path: str) -> Path | None:
        """Return the folder that holds a data set of the hub; None if none does."""
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            return None
        return next((found for folder in self.folders if (found := folder / path).is_dir()), None)

    def _local(self, value: Any) -> Any:
        """Return names of files with those that are in a folder where they are."""
        if isinstance(value, str):
            here = (folder / value for folder in self.folders)
            return next((str(path) for path in here if path.exists()), value)
        if isinstance(value, dict):
            return {split: self._local(item) for split, item in value.items()}
        return [self._local(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def _cache_alone() -> Iterator[None]:
    """Have data sets come from the cache, and no hub be asked."""
    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
