import pytest

pytest.importorskip("matplotlib")
COMMAND = ("compare", "-p", "random", "-p", "lmetric", "--requests", "60", "--rate", "10")
COMMAND += ("--seeds", "1", "--jobs", "1", "-q")


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_compare_draws_a_picture(run, tmp_path, suffix, magic):
    path = tmp_path / f"plot{suffix}"
    run(*COMMAND, "--plot", path)
    assert path.read_bytes().startswith(magic)
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_format_is_refused_before_any_work(run, tmp_path):
    done = run(*COMMAND, "--plot", tmp_path / "plot.bmp", code=2)
    assert ".png or .svg or .pdf" in done.output
    assert not list(tmp_path.iterdir())
