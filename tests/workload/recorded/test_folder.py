"""Which traces a folder holds, whatever else lies there."""

import json
from pathlib import Path

import pytest

from tailrace.errors import TailraceError
from tailrace.workload.recorded.folder import find

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,10,5\n"
SESSION = {
    "id": "s", "block_size": 64, "requests": [{"t": 0, "in": 64, "out": 5, "hash_ids": [1]}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "sheet.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "claude").mkdir()
    for name in ("one", "two"):
        (tmp_path / "claude" / f"{name}.json").write_text(json.dumps(SESSION | {"id": name}))
    (tmp_path / "claude" / "broken.json").write_bytes(b"\x1f\x8b broken")
    return tmp_path


def test_every_trace_is_found_and_everything_else_named(folder: Path) -> None:
    found, skipped = find(folder)
    assert [trace.name for trace in found] == ["azure", "claude"]
    assert [len(trace.read().table) for trace in found] == [1, 2]
    assert {s.path.name for s in skipped} == {"notes.txt", "sheet.csv", "empty.csv", "broken.json"}
    assert all(s.why for s in skipped)


def test_a_file_is_a_trace_by_itself(folder: Path) -> None:
    found, skipped = find(folder / "azure.csv")
    assert [trace.name for trace in found] == ["azure"]
    assert not skipped


def test_options_stand_beside_a_trace(folder: Path) -> None:
    (folder / "azure.toml").write_text('name = "chat"\nttft_slo_s = 3.0\n')
    (folder / "claude.toml").write_text("skip = true\n")
    (folder / "claude" / "one.toml").write_text("skip = true\n")
    found, skipped = find(folder)
    assert [trace.name for trace in found] == ["chat"]
    assert found[0].options.ttft_slo_s == 3.0
    assert "claude" in {s.path.name for s in skipped}


def test_a_mistake_in_options_names_their_file(folder: Path) -> None:
    (folder / "azure.toml").write_text("blok_size = 3\n")
    with pytest.raises(TailraceError, match=r"azure.toml.*blok_size"):
        find(folder)


def test_equal_names_are_told_apart(folder: Path) -> None:
    (folder / "day2").mkdir()
    (folder / "day2" / "azure.csv").write_text(AZURE)
    names = [trace.name for trace in find(folder)[0]]
    assert len(set(names)) == len(names) == 3


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match="no folder"):
        find(tmp_path / "missing")
