"""``llorch serve --batch-folder`` as a process: a batch that outlives its workers, and bad flags."""

from __future__ import annotations

import pytest

from support.harness.batches import begin, chat_lines, client_of, front_of, results, wait_for
from support.harness.http import send
from support.harness.processes import llorch_here, serving
from support.harness.waiting import until


def port_of(worker):
    """Return the port of its HTTP front."""
    return int(worker.command.wait_for_line(r"HTTP at http://\S+:(\d+)").group(1))


def test_a_batch_outlives_workers_that_are_killed_and_that_drain(tiny, tmp_path):
    folder = tmp_path / "kept"
    flags = (tiny, "--http", "0", "--slots", "3", "--batch-folder", folder)
    with serving(*flags) as worker, client_of(port := port_of(worker)) as client:
        begun = begin(client, chat_lines(60, max_tokens=24))
        until(lambda: client.batches.retrieve(begun.id).request_counts.completed > 3)
        assert send(port, "GET", "/load").document["running"] <= 2  # one slot is for others
        worker.command.process.kill()
    with serving(*flags) as worker, client_of(port_of(worker)) as client:
        until(lambda: client.batches.retrieve(begun.id).request_counts.completed > 15)
        worker.command.process.terminate()
        assert worker.command.wait() == 0
    done = (folder / "work" / begun.id / "output.jsonl").read_bytes().count(b"\n")
    assert 15 < done < 60
    with serving(*flags) as worker, client_of(port := port_of(worker)) as client:
        ended = wait_for(client, begun.id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 60)
        assert sorted(results(client, ended.output_file_id)) == sorted(f"a{n}" for n in range(60))
        assert ended.usage.output_tokens > 60
        assert 'route="/v1/batches/ID"' in send(port, "GET", "/metrics").body.decode()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--batch-folder", "kept"), "--batch-folder has no effect without --http"),
        (("--http", "0", "--batch-files", "3"), "--batch-files has no effect without --batch-folder"),
        (("--http", "0", "--batch-folder", "kept", "--batch-quota", "much"), "--batch-quota is 'much'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tiny, flags, words):
    outcome = llorch_here("serve", tiny, *flags)
    assert outcome.code == 2
    assert words in outcome.stderr


def test_a_folder_that_another_worker_has_is_refused_before_a_model_is_loaded(tiny, tmp_path):
    with front_of(tmp_path):
        outcome = llorch_here("serve", tiny, "--port", "0", "--http", "0", "--batch-folder", tmp_path)
    assert outcome.code == 2
    assert "another worker keeps files" in outcome.stderr
