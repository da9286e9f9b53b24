"""``--lora`` takes folders, with weights behind ``=``, and folders whose own names hold one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_export.adapter.choice import AdapterChoice, parse_choices
from llorch_serve.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "run=2", "c=1", "c"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("a", "a", 1.0),
        ("a=0.5", "a", 0.5),
        ("a=-1e-1", "a", -0.1),
        ("run=2", "run=2", 1.0),
        ("run=2=0.5", "run=2", 0.5),
        ("c=1=1", "c=1", 1.0),
        ("c/=1", "c", 1.0),
        ("gone=half", "gone=half", 1.0),
        ("=1", "=1", 1.0),
    ],
)
def test_a_folder_and_its_weight(text: str, path: str, weight: float) -> None:
    assert parse_choices([text]) == (AdapterChoice(Path(path), weight),)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["c=1"], "may mean the folder c=1 or 1 times the folder c"),
        (["a=0"], "without effect"),
        (["a=nan"], "expected a number other than 0"),
        (["a=inf"], "expected a number other than 0"),
        (["a=1e9"], "from -1000 to 1000"),
        (["a", "b", "a/=0.5"], "twice"),
    ],
)
def test_weights_that_mean_nothing_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_choices(texts)
