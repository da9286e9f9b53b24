"""One stage of a model as a Ray actor: bytes in, bytes out, as of a stage in another process of one machine.

A replica makes one for each stage, on the nodes that Ray keeps for it. Ray ends it with the replica.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from dataclasses import replace
from typing import Final

import msgspec
import psutil

from llorch_serve.cluster.cores import pin_process
from llorch_serve.cluster.place import check_version, find_folder
from llorch_serve.cluster.settings import read_settings
from llorch_serve.stages import control
from llorch_serve.stages.loading import StageLoader
from llorch_serve.stages.remote import answered
from llorch_serve.stages.stage import Stage

_BROKEN: Final = 70  # an exit code: EX_SOFTWARE of sysexits.h


class StageActor:
    """Loads a stage as it is told, then answers the lanes, each on a thread of Ray's.

    settings: of the replica, see :class:`llorch_serve.cluster.settings.ReplicaSettings`. number: the stage's.
    """

    def __init__(self, settings: bytes, number: int) -> None:
        self._settings = read_settings(settings)
        self._number = number
        self._loader: StageLoader | None = None
        self._stage: Stage | None = None

    def prepare(self, message: bytes) -> bytes:
        """Answer a question of :mod:`llorch_serve.stages.control`. Failures are answers too."""
        try:
            return control.write(self._answer(control.read_question(memoryview(message))))
        except Exception as error:  # noqa: BLE001 - told to the replica, in words that it passes on
            return control.write(control.refused(error))

    def answer(self, lane: int, question: bytes) -> bytes:
        """Answer a lane's question, see :func:`llorch_serve.stages.remote.answered`. An error that is no
        answer ends this process, and so the replica: nothing that the stage holds can be trusted after it.
        """
        try:
            assert self._stage is not None, "a stage is loaded before it is called"
            return b"".join(answered(self._stage, lane, memoryview(question)))
        except BaseException:  # noqa: BLE001 - whatever it is
            traceback.print_exc()
            os._exit(_BROKEN)

    def stay(self) -> None:
        """Never return, so that who waits for it learns that this process has ended."""
        threading.Event().wait()

    def _answer(self, question: control.Question) -> control.Answer:
        if isinstance(question, control.Load):
            assert self._loader is not None, "room is asked for before loading"
            self._stage = self._loader.load(question.lanes)
            return control.loaded(self._stage.facts)
        check_version(self._settings)
        share = self._settings.stages
        assert share is not None, "a replica without stages makes no actors"
        pin_process(share.cores)
        folder = find_folder(self._settings, stage=self._number)
        asked = msgspec.structs.replace(question, folder=str(folder))
        self._loader = StageLoader(control.asked_settings(asked))
        room = self._loader.room()
        free = psutil.virtual_memory().available
        return control.Room(room=replace(room, host=socket.gethostname(), host_bytes=free))
