"""``llorch bench`` on a tiny model: reports of one entry and of several, of a worker, and comparison. Speed
is not looked at.
"""

from __future__ import annotations

import json
import sys

import msgspec
import psutil
import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.bench.schema import Report
from llorch_serve.providers.table import PROVIDERS
from support.builders.reference_files import own_reference
from support.builders.tiny_exports import random_ids
from support.harness.processes import llorch, llorch_here

SHORT = ("--prompt-tokens", "20", "--max-tokens", "64", "--repeat", "1")
QUICK = (*SHORT, "--streams", "1,2", "--json")


def report(outcome):
    assert outcome.code == 0, outcome
    return msgspec.json.decode(outcome.stdout, type=Report)


def check(found, works=("prefill", "decode", "mixed")):
    (entry,) = found.entries
    assert (entry.model.precision, entry.provider) == ("int8", "CPUExecutionProvider")
    tests = [(row.test.work, row.test.streams) for row in entry.rows]
    assert tests == [(work, streams) for work in works for streams in (1, 2)]
    for row in entry.rows:
        # Of two streams this short, one may end before the other has begun; nothing is then left to count.
        for name, figure in row.figures.items():
            assert figure.median > 0 or (name.startswith("decode") and row.test.streams > 1)
            assert len(figure.values) == 1


def test_json_is_one_document_on_stdout(tiny):
    outcome = llorch("bench", tiny, *QUICK)
    found = report(outcome)
    check(found)
    assert outcome.stderr == ""
    (entry,) = found.entries
    assert entry.label == "cpu"
    assert entry.load_s > 0
    assert entry.peak_rss_mib > 10
    assert entry.model.folder_bytes > 1000
    assert [(share.provider, share.node_share) for share in entry.placement] == [
        ("CPUExecutionProvider", 1.0)
    ]
    assert any(name.startswith("onnxruntime ") for name in entry.software)


def test_a_worker_can_be_measured(tiny_worker):
    found = report(llorch_here("bench", "--connect", tiny_worker.address, *QUICK))
    (entry,) = found.entries
    assert (entry.label, entry.load_s, entry.peak_rss_mib) == ("worker", None, None)
    assert [(row.test.arrivals, row.test.concurrency) for row in entry.rows] == [
        ("together", 1),
        ("together", 2),
    ]
    assert all(row.figures["prefill_tokens_per_s"].median > 0 for row in entry.rows)


def test_tests_depths_and_files(tiny, tmp_path):
    flags = (*SHORT, "--tests", "decode,prefill", "--depth", "0,32", "--streams", "2", "--max-context", "128")
    files = {name: tmp_path / f"r.{name}" for name in ("csv", "markdown", "html")}
    outcome = llorch_here(
        "bench",
        tiny,
        *flags,
        *(part for name, file in files.items() for part in (f"--{name}", file)),
        "--json",
    )
    (entry,) = report(outcome).entries
    assert [(row.test.work, row.test.depth, row.problem) for row in entry.rows] == [
        ("prefill", 0, None),
        ("prefill", 32, None),
        ("decode", 0, None),
        ("decode", 32, None),
    ]
    assert files["csv"].read_text().startswith("entry,provider,kind,work,")
    assert "| decode 64 behind 32, 2 streams | cpu |" in files["markdown"].read_text()
    assert files["html"].read_text().startswith("<!DOCTYPE html>")


@pytest.fixture(scope="module")
def exact(tiny_source, export_here):
    return export_here(tiny_source, tiny_source.parent / "for-bench", "--precision", "fp32")


def test_two_entries_in_one_report(tiny, exact, tmp_path):
    reference = tmp_path / "reference"
    own_reference(reference, load_artifact(exact), random_ids(20))
    flags = (*SHORT, "--tests", "prefill", "--streams", "1", "--reference", reference, "--json")
    here = f"cpu@{sys.executable}={exact}"
    first, second = report(llorch("bench", tiny, "--provider", "cpu", "--provider", here, *flags)).entries
    assert (first.label, second.label) == (f"cpu:{tiny.name}", "cpu:for-bench")
    assert (first.model.precision, second.model.precision) == ("int8", "fp32")
    assert first.fidelity.kl > second.fidelity.kl
    assert all(entry.rows[0].figures["prefill_tokens_per_s"].median > 0 for entry in (first, second))


@pytest.mark.skipif(sys.platform != "linux", reason="what is absent differs by system")
def test_a_failing_provider_is_told_beside_those_that_run(tiny, tiny_source, export_here):
    folder = export_here(
        tiny_source, tiny_source.parent / "for-cuda", "--target", "cuda", "--precision", "fp16"
    )
    flags = (*SHORT, "--tests", "prefill", "--streams", "1")
    outcome = llorch("bench", tiny, "--provider", f"cuda={folder}", "--provider", "cpu", *flags, "--json")
    assert outcome.code == 4
    cuda, cpu = msgspec.json.decode(outcome.stdout, type=Report).entries
    assert cuda.problem.exit_code == 4
    assert "the wheel onnxruntime-gpu is not installed" in cuda.problem.message
    assert (cuda.rows, cpu.problem, len(cpu.rows)) == ((), None, 1)
    assert outcome.stderr.splitlines()[-1].startswith("error: cuda: CUDAExecutionProvider is not available")


def processor_time():
    """Seconds of processor time of all ended processes, which other work on the machine does not add to."""
    return psutil.Process().cpu_times().children_user + psutil.Process().cpu_times().children_system


@pytest.mark.skipif(sys.platform != "linux", reason="what is absent differs by system")
@pytest.mark.parametrize(
    "row", [row for row in PROVIDERS if row.name not in ("cpu", "coreml")], ids=lambda row: row.name
)
def test_each_absent_provider_ends_the_command_at_once(row, tiny_source, export_here, tmp_path):
    target = ("--target", row.targets[0], "--precision", "int4")
    folder = export_here(tiny_source, tmp_path / "a", *target)
    before = processor_time()
    outcome = llorch("bench", "--provider", f"{row.name}={folder}", *SHORT)
    assert processor_time() - before < 6
    assert outcome.code == 4
    assert row.wheel in outcome.error()
    assert "available here: CPUExecutionProvider" in outcome.error()
    assert all(library in outcome.error() for library in row.libraries if "libcuda" in library)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--provider", "cdua"), 4, "did you mean cuda?"),
        (("--provider", "openvino"), 4, "--target openvino"),
        (("--provider", "cpu", "--provider-option", "use_aren=1"), 4, "did you mean use_arena?"),
        (("--provider", "cpu@/no/such/python"), 4, "/no/such/python is no interpreter"),
        (("--provider", "cpu@/bin/false"), 4, "/bin/false does not run llorch"),
        (("--provider", "cpu@"), 2, "NAME[@PYTHON][=DIR]"),
        (("--ep-library", "/no/lib.so"), 4, "/no/lib.so"),
        (("--tests", "decode,prefil"), 2, "--tests has 'prefil'"),
        (("--depth", "8"), 2, "--depth is 8"),
        (("--depth", "x"), 2, "--depth"),
        (("--streams", "1,1"), 2, "--streams"),
        (("--html", "/no/such/folder/r.html"), 2, "--html is /no/such/folder/r.html"),
    ],
)
def test_slips_are_refused_by_name(tiny, flags, code, says):
    outcome = llorch_here("bench", tiny, *SHORT, *flags)
    assert (outcome.code, outcome.stdout) == (code, "")
    assert says in outcome.error()


@pytest.mark.parametrize(
    ("spec", "code", "says"),
    [
        ("cpu=/no/such/folder", 3, "/no/such/folder"),
        ("cpu=", 2, "NAME[@PYTHON][=DIR]"),
        ("cpu", 2, "no model given"),
    ],
)
def test_a_folder_that_is_not_there_is_refused(spec, code, says):
    outcome = llorch_here("bench", "--provider", spec, *SHORT)
    assert outcome.code == code
    assert says in outcome.error()


def test_a_folder_for_all_and_one_for_each_is_refused(tiny):
    outcome = llorch_here("bench", tiny, "--provider", f"cpu={tiny}", *SHORT)
    assert outcome.code == 2
    assert "leave DIR out" in outcome.error()


def test_a_source_for_one_entry_is_refused_with_the_line_that_exports_it(tiny_source):
    outcome = llorch_here("bench", "--provider", f"cpu={tiny_source}", *SHORT)
    assert outcome.code == 3
    assert "--output DIR --target cpu" in outcome.error()


def test_compare_by_exit_code(tiny, tmp_path):
    before = tmp_path / "before.json"
    outcome = llorch_here("bench", tiny, *SHORT, "--streams", "1", "--tests", "prefill", "--json")
    before.write_text(outcome.stdout)
    same = llorch_here("bench", "compare", before, before, "--fail-under", "1")
    assert (same.code, same.stdout.splitlines()[-1].split(":")[0]) == (0, "passed")
    slow = json.loads(outcome.stdout)
    figure = slow["entries"][0]["rows"][0]["figures"]["prefill_tokens_per_s"]
    figure["median"] *= 0.9
    after = tmp_path / "after.json"
    after.write_text(json.dumps(slow))
    worse = llorch_here("bench", "compare", before, after, "--fail-under", "0.95", "--json")
    assert worse.code == 1
    assert json.loads(worse.stdout)["passed"] is False
    assert llorch_here("bench", "compare", before, after, "--fail-under", "0.85").code == 0
    other = llorch_here("bench", "compare", before, tiny / "llorch.json")
    assert other.code == 2
    assert "llorch.json is no report" in other.error()


def test_more_streams_than_slots_is_said(tiny_worker):
    flags = ("--prompt-tokens", "5", "--max-tokens", "2", "--repeat", "1", "--streams", "9")
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *flags)
    assert outcome.code == 0
    assert "8 slots" in outcome.stderr


def test_a_table_for_people(tiny):
    outcome = llorch_here("bench", tiny, *QUICK[:-1])
    lines = outcome.stdout.splitlines()
    assert lines[3].split()[:2] == ["test", "entry"]
    assert [line.split()[0] for line in lines[4:]] == ["prefill"] * 2 + ["decode"] * 2 + ["prefill"] * 2


@pytest.mark.parametrize("remote", [False, True])
def test_prompt_ids_are_read_from_a_file(tiny, tiny_worker, tmp_path, remote):
    path = tmp_path / "ids.json"
    where = ("--connect", tiny_worker.address) if remote else (tiny,)
    flags = ("--max-tokens", "4", "--repeat", "1", "--streams", "1", "--prompt-ids", path, "--json")
    path.write_text(json.dumps([5, 6, 7]))
    (entry,) = report(llorch_here("bench", *where, *flags)).entries
    assert entry.rows[-1].test.prompt_tokens == 3
    path.write_text(json.dumps([5] * 125))
    outcome = llorch_here("bench", *where, *flags)
    assert outcome.code == 2
    assert "a context of 129" in outcome.error()
    path.write_text(json.dumps([5, 512]))
    outcome = llorch_here("bench", *where, *flags)
    assert outcome.code == 2
    assert "512" in outcome.error()


def test_prompt_ids_may_be_a_list(tiny):
    flags = ("--max-tokens", "4", "--repeat", "1", "--streams", "1", "--prompt-ids", "5,6,7", "--json")
    (entry,) = report(llorch_here("bench", tiny, *flags)).entries
    assert entry.rows[-1].test.prompt_tokens == 3


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--streams", "1,x"), "--streams"),
        (("--streams", "0"), "--streams"),
        (("--prompt-tokens", "0"), "--prompt-tokens"),
        (("--prompt-tokens", "4", "--prompt-ids", "ids.json"), "--prompt-ids"),
        (("--prompt-ids", "/no/such/file"), "/no/such/file"),
        (("--prompt-ids", ""), "--prompt-ids"),
        (("--wait", "1"), "--wait"),
        (("--prompt-tokens", "120", "--max-tokens", "9"), "128"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(tiny, flags, named):
    outcome = llorch_here("bench", tiny, *flags)
    assert outcome.code == 2
    assert named in outcome.error()


@pytest.mark.parametrize(
    "flag",
    [
        ("DIR",),
        ("--model", "m"),
        ("--max-context", "64"),
        ("--threads", "1"),
        ("--provider", "cpu"),
        ("--provider-option", "a=1"),
        ("--ep-library", "x.so"),
        ("--allow-cpu-nodes",),
        ("--tests", "decode"),
        ("--depth", "32"),
    ],
)
def test_flags_that_a_worker_cannot_follow_are_refused(flag):
    outcome = llorch_here("bench", "--connect", "127.0.0.1:1", *flag)
    assert outcome.code == 2
    assert flag[0] in outcome.error()


def test_model_path_is_honoured(tiny):
    check(report(llorch_here("bench", *QUICK, MODEL_PATH=tiny)))
