"""``--provider NAME[@PYTHON][=DIR]`` and what goes with it: read, matched with each other, refused before
anything runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llorch_serve.bench.entries import PlannedEntry, find_entries
from llorch_serve.errors import ProviderError, UsageError
from support.builders.tiny_artifact import tiny_manifest, write_tiny_artifact


@pytest.fixture
def cpu(tmp_path: Path) -> Path:
    return write_tiny_artifact(tmp_path / "for-cpu", tiny_manifest(target="cpu"))


@pytest.fixture
def ov(tmp_path: Path) -> Path:
    return write_tiny_artifact(tmp_path / "for-ov", tiny_manifest(target="openvino"))


def find(*specs: str, folder: Path | None = None, options: tuple[str, ...] = ()) -> list[PlannedEntry]:
    return find_entries(specs, folder, options, None, cpu_nodes=False)


def test_without_a_provider_it_is_the_cpu_in_this_interpreter(cpu: Path) -> None:
    (found,) = find(folder=cpu)
    assert (found.label, found.choice.name, found.python, found.folder) == ("cpu", None, sys.executable, cpu)


def test_name_interpreter_and_folder(cpu: Path, ov: Path) -> None:
    first, second = find("cpu", f"openvino@{sys.executable}={ov}", folder=cpu)
    assert (first.label, first.python, first.folder) == ("cpu", sys.executable, cpu)
    assert (second.label, second.python, second.folder) == ("openvino", sys.executable, ov)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    odd = write_tiny_artifact(tmp_path / "a@b=c", tiny_manifest(target="cpu"))
    (found,) = find(f"cpu={odd}")
    assert found.folder == odd


@pytest.mark.parametrize("spec", ["", "=x", "@python", "cpu@", "cpu=", "cpu@=x"])
def test_what_lacks_a_part_is_refused(cpu: Path, spec: str) -> None:
    with pytest.raises(UsageError, match=r"expected NAME\[@PYTHON\]\[=DIR\]"):
        find(spec, folder=cpu)


def test_an_entry_without_a_folder_needs_one() -> None:
    with pytest.raises(UsageError, match="cpu has no model"):
        find("cpu")


def test_a_misspelt_provider_is_refused_with_the_nearest_name(cpu: Path) -> None:
    with pytest.raises(ProviderError, match="did you mean openvino"):
        find("cpu", "opnvino", folder=cpu)


def test_an_artifact_that_does_not_fit_is_refused_with_the_line_that_makes_another(
    cpu: Path, ov: Path
) -> None:
    with pytest.raises(ProviderError, match="--target openvino"):
        find("cpu", "openvino", folder=cpu)
    with pytest.raises(ProviderError, match="target cpu"):
        find(f"openvino={cpu}")
    assert len(find(f"cpu={ov}")) == 1  # which has kernels for that target too


def test_no_interpreter_is_refused(cpu: Path) -> None:
    with pytest.raises(ProviderError, match="/no/such/python is no interpreter"):
        find("cpu@/no/such/python", folder=cpu)


def test_options_go_to_the_provider_that_they_name(cpu: Path, ov: Path) -> None:
    options = ("cpu:use_arena=0", "openvino:device_type=CPU", "openvino:num_streams=1")
    first, second = find("cpu", f"openvino={ov}", folder=cpu, options=options)
    assert first.choice.options == ("use_arena=0",)
    assert second.choice.options == ("device_type=CPU", "num_streams=1")
    (alone,) = find("cpu", folder=cpu, options=("use_arena=0",))
    assert alone.choice.options == ("use_arena=0",)
    (implied,) = find(folder=cpu, options=("use_arena=0",))
    assert implied.choice.options == ("use_arena=0",)


@pytest.mark.parametrize("option", ["use_arena=0", "cuda:device_id=0"])
def test_an_option_of_none_of_several_is_refused(cpu: Path, ov: Path, option: str) -> None:
    with pytest.raises(UsageError, match="write NAME:KEY=VALUE"):
        find("cpu", f"openvino={ov}", folder=cpu, options=(option,))


def test_a_misspelt_option_is_refused_with_the_nearest_name(cpu: Path, ov: Path) -> None:
    with pytest.raises(ProviderError, match="did you mean device_type"):
        find("cpu", f"openvino={ov}", folder=cpu, options=("openvino:device_typ=CPU",))
    with pytest.raises(ProviderError, match="use_arena"):
        find(folder=cpu, options=("use_arena=maybe",))


def test_a_plugin_library_is_for_one_provider(cpu: Path) -> None:
    with pytest.raises(UsageError, match="--ep-library"):
        find_entries(["cpu", "webgpu"], cpu, (), Path("x.so"), cpu_nodes=False)
    (found,) = find_entries((), cpu, (), Path("libsome.so"), cpu_nodes=True)
    assert (found.label, found.choice.library, found.choice.allow_cpu_nodes) == (
        "libsome",
        Path("libsome.so"),
        True,
    )


def test_no_two_entries_share_a_label(cpu: Path, ov: Path, tmp_path: Path) -> None:
    twin = write_tiny_artifact(tmp_path / "other" / "for-cpu", tiny_manifest(target="cpu"))
    labels = [found.label for found in find(f"cpu={cpu}", f"cpu={ov}", f"cpu={twin}", f"openvino={ov}")]
    assert labels == ["cpu:for-cpu", "cpu:for-ov", "cpu:for-cpu#2", "openvino"]


def test_nodes_on_the_cpu_are_accepted_for_entries_that_are_not_the_cpu_itself(cpu: Path, ov: Path) -> None:
    found = find_entries(["CPU", f"openvino={ov}"], cpu, (), None, cpu_nodes=True)
    assert [entry.choice.allow_cpu_nodes for entry in found] == [False, True]
    alone = find_entries(["cpu", "cpu"], cpu, (), None, cpu_nodes=True)
    assert [entry.choice.allow_cpu_nodes for entry in alone] == [True, True], (
        "to be refused where it does nothing"
    )
