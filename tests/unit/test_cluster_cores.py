"""Cores for each replica alone: those of one NUMA node first, and none twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llorch_serve.cluster import cores
from llorch_serve.cluster.cores import choices, pin_process, take_cores

TWO_NODES = {core: (core // 4, core) for core in range(8)}
HYPERTHREADS = {core: (0, core % 4) for core in range(8)}


def first(count: int, places: dict[int, tuple[int, int]]) -> tuple[int, ...]:
    return next(choices(count, list(places), places.__getitem__))


def test_a_replica_of_a_nodes_size_gets_a_node(tmp_path):
    taken = [take_cores(4, list(TWO_NODES), tmp_path, where=TWO_NODES.__getitem__) for _ in range(3)]
    assert taken == [{0, 1, 2, 3}, {4, 5, 6, 7}, None]


def test_replicas_of_other_sizes_do_not_overlap(tmp_path):
    sizes = (3, 1, 2, 2)
    taken = [take_cores(size, list(TWO_NODES), tmp_path, where=TWO_NODES.__getitem__) for size in sizes]
    assert taken == [{0, 1, 2}, {3}, {4, 5}, {6, 7}]


def test_what_does_not_fit_one_node_takes_of_two(tmp_path):
    assert take_cores(6, list(TWO_NODES), tmp_path, where=TWO_NODES.__getitem__) == set(range(6))
    assert take_cores(3, list(TWO_NODES), tmp_path, where=TWO_NODES.__getitem__) is None
    assert take_cores(2, list(TWO_NODES), tmp_path, where=TWO_NODES.__getitem__) == {6, 7}


def test_the_threads_of_a_physical_core_stay_together():
    assert first(2, HYPERTHREADS) == (0, 4)


def test_more_cores_than_there_are_is_none(tmp_path):
    assert take_cores(9, list(TWO_NODES), tmp_path, where=TWO_NODES.__getitem__) is None


def test_cores_are_free_again_when_their_process_has_ended(tmp_path):
    code = (
        "import sys; from pathlib import Path; from llorch_serve.cluster.cores import take_cores\n"
        "print(take_cores(2, [0, 1], Path(sys.argv[1]), where=lambda core: (0, core)), flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "frozenset({0, 1})\n"
        assert take_cores(1, [0, 1], tmp_path, where=lambda core: (0, core)) is None
        other.stdin.close()
        other.wait()
    assert take_cores(1, [0, 1], tmp_path, where=lambda core: (0, core)) == {0}


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "core-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        take_cores(1, [0], tmp_path, where=lambda core: (0, core))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs the affinity of Linux")
def test_every_thread_of_a_process_is_pinned(tmp_path):
    code = (
        "import os, threading; from llorch_serve.cluster.cores import pin_process\n"
        "end = threading.Event(); threading.Thread(target=end.wait).start()\n"
        "taken = pin_process(1)\n"
        "tasks = os.listdir('/proc/self/task')\n"
        "print(len(taken), len(tasks), all(os.sched_getaffinity(int(t)) == taken for t in tasks)); end.set()"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "1 2 True\n"


def test_without_affinity_threads_run_anywhere(monkeypatch):
    monkeypatch.setattr(cores.sys, "platform", "darwin")
    assert pin_process(1) is None


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cores.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"llorch-cores-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(cores.ResourceError, match="is not this user's folder"):
        cores.lock_folder()
