"""Runs on several kinds of machine: what kind one is, the document that keeps the last run of each, and the
page that shows all of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from bench_peers import __main__ as bench
from bench_peers.machine import cpu_fields, describe, kind_of, slug_of, vendor_of
from bench_peers.markdown import markers
from bench_peers.page import picture_of, section, with_run, written
from bench_peers.results import Document, Machine, Run, read_runs
from llorch_serve.errors import UsageError
from support.builders.bench_runs import run

ROOT = Path(__file__).parents[2]
AVX512 = ["avx2", "avx512f", "avx512_vnni", "avx_vnni"]
AMD = Machine("AMD EPYC", 2, AVX512, 16.0, "Linux", 0.0, "AMD")
INTEL = Machine("Intel Xeon Processor", 2, [*AVX512, "amx_int8"], 16.0, "Linux", 0.0, "Intel", virtual=True)


def on(machine: Machine, **changes: object) -> Run:
    return run(machine=machine, **changes)


@pytest.mark.parametrize(
    ("vendor", "instructions", "kind"),
    [
        ("Intel", INTEL.instructions, "Intel with AMX"),
        ("AMD", AVX512, "AMD with AVX-512 VNNI, without AMX"),
        ("Intel", ["avx2", "avx512f"], "Intel with AVX-512, without AMX"),
        ("Intel", ["avx2", "avx_vnni"], "Intel with AVX-VNNI, without AMX"),
        ("AMD", ["avx2"], "AMD with AVX2, without AMX"),
        ("Arm", ["asimddp", "i8mm"], "Arm with I8MM"),
        ("Apple", ["asimddp"], "Apple with dot products"),
        ("Arm", [], "Arm"),
        ("", [], "Some CPU"),
    ],
)
def test_a_kind_is_who_made_the_cpu_and_its_fastest_instructions(
    vendor: str, instructions: list[str], kind: str
) -> None:
    assert kind_of(Machine("Some CPU", 2, instructions, 16.0, "Linux", 0.0, vendor)) == kind


def test_a_hidden_model_name_makes_no_other_kind() -> None:
    hidden = msgspec.structs.replace(INTEL, cpu="Intel(R) Xeon(R) Platinum 8481C", cores=8)
    assert kind_of(hidden) == kind_of(INTEL)


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor : 0\nvendor_id : GenuineIntel\n", "Intel"),
        ("vendor_id : AuthenticAMD\n\nvendor_id : GenuineIntel\n", "AMD"),
        ("processor : 0\nCPU implementer : 0x41\n", "Arm"),
        ("vendor_id : HygonGenuine\n", "HygonGenuine"),
        ("", ""),
    ],
)
def test_who_made_a_cpu_is_read_from_the_system(text: str, vendor: str) -> None:
    assert vendor_of(cpu_fields(text)) == vendor


def test_a_machine_is_described_with_its_hypervisor_and_instructions() -> None:
    cpu = Machine("Intel Xeon Processor", 2, ["avx2", "amx_int8"], 16.0, "Linux", 0.0, virtual=True)
    assert describe(cpu) == "Intel Xeon Processor, 2 cores in a virtual machine with avx2, amx_int8"
    assert describe(Machine("A CPU", 4, [], 1.0, "Linux", 0.0)) == "A CPU, 4 cores"


def test_a_run_replaces_that_on_its_kind_of_machine_and_leaves_the_others() -> None:
    first, second = on(AMD, date="2026-01-01"), on(INTEL, date="2026-01-02")
    runs = with_run(with_run([], second), first)
    assert [kind_of(one.machine) for one in runs] == ["AMD with AVX-512 VNNI, without AMX", "Intel with AMX"]
    again = with_run(runs, on(INTEL, date="2026-01-03"))
    assert [one.date for one in again] == ["2026-01-01", "2026-01-03"]


def test_kinds_stand_side_by_side_and_each_has_a_section() -> None:
    near = [msgspec.structs.replace(one, kl=0.02) if one.ours else one for one in run().subjects]
    text = section([on(AMD, subjects=near), on(INTEL)])
    summary, amd, intel = text.split("\n## ")
    assert "| figure | at | asked | AMD with AVX-512 VNNI, without AMX | Intel with AMX |" in summary
    row = "| decode, 1 stream | KL <= {} | no recipe of ours: **no** | {} |"
    assert row.format("0.01 | >= 1.25", "1.20 (1.20 to 1.20): **no**") in summary
    assert row.format("0.0027 | >= 1.2", "1.25 (1.25 to 1.25): yes") in summary
    assert amd.startswith("AMD with AVX-512 VNNI, without AMX\n")
    assert "AMD EPYC, 2 cores with avx2" in amd
    assert intel.startswith("Intel with AMX\n")
    assert "amx_int8" in intel
    assert f"![Speed against divergence]({picture_of(on(INTEL))})" in intel
    assert picture_of(on(INTEL)) == "performance-intel-with-amx.png" != picture_of(on(AMD))


def test_a_figure_that_only_one_run_has_leaves_the_other_cell_empty() -> None:
    more = msgspec.structs.replace(run().gains[0], prefix_tokens=64)
    text = section([on(AMD), on(INTEL, gains=[more] * 3)])
    rows = [line for line in text.split("\n## ")[0].splitlines() if "-token prefix" in line]
    assert [line.split("|")[4:6] for line in rows] == [
        [" 0.05 (0.05 to 0.05): yes ", "  "],
        ["  ", " 0.05 (0.05 to 0.05): yes "],
    ]


def test_slugs_are_names_of_files() -> None:
    assert slug_of("AMD with AVX-512 VNNI, without AMX") == "amd-with-avx-512-vnni-without-amx"


def test_runs_survive_their_document(tmp_path: Path) -> None:
    path = tmp_path / "performance.json"
    assert read_runs(path) == []
    path.write_bytes(msgspec.json.encode(Document(runs=[on(AMD), on(INTEL)])))
    assert read_runs(path) == [on(AMD), on(INTEL)]


@pytest.mark.parametrize(
    "change", [{"schema_version": 1}, {"runs": [{}]}, {"machine": {}}], ids=["older", "no run", "one run"]
)
def test_another_document_is_refused_with_the_version_that_is_read(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "performance.json"
    path.write_text(json.dumps({"schema_version": 2, "runs": []} | change))
    with pytest.raises(UsageError, match=r"no document of runs, schema version 2.*ci/bench"):
        read_runs(path)


def test_the_page_in_the_repository_is_made_of_its_document() -> None:
    pictures = {picture_of(one) for one in read_runs(ROOT / "docs" / "performance.json")}
    assert pictures == {path.name for path in (ROOT / "docs").glob("performance*.png")}
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert written(ROOT / "docs", page) == page, "write it anew with ci/bench --page"


def test_a_run_writes_its_picture_the_document_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, end = markers("ci/bench")
    page = tmp_path / "performance.md"
    page.write_text(f"# Speed\n\n{begin}\n\nbefore it\n\n{end}\n\nHow.\n")
    monkeypatch.setattr(bench, "PAGE", page)
    monkeypatch.setattr(bench, "draw", lambda _run, path: path.write_bytes(b"png"))
    bench._write(on(INTEL), [on(AMD)], tmp_path)
    assert (tmp_path / "performance-intel-with-amx.png").exists()
    assert read_runs(tmp_path / "performance.json") == [on(AMD), on(INTEL)]
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Speed\n\n{begin}\n\n## Asked and measured")
    assert text.endswith(f"{end}\n\nHow.\n")
    assert "before it" not in text
    assert written(tmp_path, text) == text
