"""Where tasks' data sets come from: a folder given on the command line first, then the hub or its cache.

lm-eval has no option for it, so ``datasets.load_dataset``, which it and tasks call, is another function while
tasks are made. Needs ``datasets``; ``tasks.py`` imports this module when tasks are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import datasets

from llorch_serve.errors import HubError


@dataclass(slots=True)
class DataSets:
    """folders: of ``--task-folder``. wanted: the data set that was asked for last, and its configuration;
    files: what it is to be made of, where a task names that itself.
    """

    folders: Sequence[Path]
    wanted: tuple[str, str | None] | None = field(default=None, init=False)
    files: object = field(default=None, init=False)

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Have tasks that are made inside find their data in the folders."""
        load = datasets.load_dataset

        def load_dataset(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
            self.wanted, self.files = (path, name), options.get("data_files")
            if (folder := self._folder(path)) is not None:
                path = str(folder)
            for option in ("data_files", "data_dir"):
                if option in options:
                    options[option] = self._local(options[option])
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
        reason = " ".join(str(error).split())[:300]
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
