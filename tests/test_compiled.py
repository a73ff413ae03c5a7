"""The compile cache."""

from pathlib import Path

from tailrace import compiled


def test_the_cache_is_named_by_every_file_with_compiled_code():
    """Else an edited kernel would go on running as it was."""
    package = Path(compiled.__file__).parent
    named = {path for pattern in compiled._KERNEL_SOURCES for path in package.glob(pattern)}
    users = {
        path
        for path in package.rglob("*.py")
        if "from tailrace.compiled import" in path.read_text(encoding="utf-8")
    }
    assert len(users) > 10
    assert users - named == set()
