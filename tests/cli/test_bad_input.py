import re
from pathlib import Path

import click
import pytest

from tailrace.cli import cli

QUICK = ("--requests", "60", "--rate", "20")
OUT = ("-o", "out.csv", "--trace", "trace.json")
HEADER = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["simulat"], "unknown command 'simulat'; did you mean simulate"),
        (["simulate", "--polcy", "x"], "No such option"),
        (["simulate", "--policy", "round_robbin"], "unknown policy 'round_robbin'; did you mean "),
        (["simulate", "--workload", "chta"], "unknown workload 'chta'; did you mean chat"),
        (["simulate", "--scenario", "dmo"], "unknown scenario 'dmo'; did you mean demo"),
        (["simulate", "--device", "a100-llama3"], "unknown device 'a100-llama3'; did you mean "),
        (["simulate", "--scheduler", "sarati"], "'sarati' is not one of"),
        (["simulate", "--requests", "many"], "'many' is not a valid int"),
        (["simulate", "--requests", 0], "workload.requests: .*greater than or equal to 1, got 0"),
        (["simulate", "--requests", -5], "workload.requests: .*got -5"),
        (["simulate", "--requests", 10**9], "workload.requests: .*less than or equal to 50000000"),
        (["simulate", "--rate", -1], "workload.rate: .*greater than 0, got -1.0"),
        (["simulate", "--rate", "nan"], "workload.rate: .*finite number, got nan"),
        (["simulate", "--load", "nan"], "workload.load: .*got nan"),
        (["simulate", "--replicas", 0], "cluster.replicas.0.count: .*got 0"),
        (["simulate", "--replicas", 2000], "cluster.replicas.0.count: .*1024, got 2000"),
        (["simulate", "--set", "cluster.replicas=[]"], "cluster.replicas: .*at least 1 item"),
        (["simulate", "--speed", 0], "cluster.replicas.0.speed: .*got 0.0"),
        (["simulate", "--watermark", 1.5], "cluster.replicas.0.watermark: .*got 1.5"),
        (["simulate", "--seed", -1], "-1 is not in the range x>=0"),
        (["simulate", "--warmup", 1.0], "1.0 is not in the range 0<=x<1"),
        (["simulate", "--num-blocks", 4], "request 0 may need .* blocks, but replica 0 has only 4"),
        (["simulate", "--config", "none.toml"], "cannot read none.toml: No such file"),
        (["simulate", "--workload", "none.csv"], "cannot read none.csv: No such file"),
        (["simulate", "--set", "router.stale=1"], "unknown setting 'router.stale'; did you mean"),
        (["simulate", "--num-stages", 2, "--engine", "compiled"], "not possible"),
        (["compare", "-p", "rnd"], "unknown policy 'rnd'"),
        (["compare", "--reference", "least"], "unknown policy 'least'"),
        (["compare", "--seeds", 0], "0 is not in the range"),
        (["capacity", "--attainment", 1.5], r"attainment must be a share in \(0, 1\], got 1.5"),
        (["capacity", "--ttft-p99-s", -1], "ttft_p99_s must be a positive number"),
        (["capacity", "--policy", "nix"], "unknown policy 'nix'"),
        (["policies", "load_awar"], "unknown policy 'load_awar'; did you mean load_aware"),
        (["devices", "a40"], "unknown device 'a40'"),
        (["scenarios", "dem"], "unknown scenario 'dem'; did you mean demo"),
        (["workload", "describe", "chatt"], "unknown workload 'chatt'; did you mean chat"),
        (["workload", "write", "chat", "--out", "x.txt"], "must end in .csv or .parquet"),
        (["workload", "write", "chat", "--out", "a/b.csv"], "there is no folder a"),
        (["workload", "import", "none.csv", "--out", "x.csv"], "cannot read none.csv"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
        (["fit", "--mlp", "a.csv", "--attention", "b.csv", "--layers", 2], "cannot read a.csv"),
    ],
)  # fmt: skip
def test_one_sentence_and_exit_code_2(refuse, args, message):
    if args[0] == "simulate":
        # What the user asked to be written must not appear, not even in part.
        args = [*args, *OUT, *(() if "--rate" in args or "--load" in args else ("--rate", 20))]
    assert re.search(message, refuse(*args))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (HEADER, "empty|no rows|no requests"),
        (HEADER + "0,100,10\n2,100,10\n1,100,10\n", "line 4.*before the request above it"),
        (HEADER + "0,100,10\nnan,100,10\n", "line 3.*arrival_s"),
        (HEADER + "0,100,10\n1,-100,10\n", "line 3.*prompt_tokens"),
        (HEADER + "0,100,0\n", "line 2.*output_tokens"),
        (HEADER + "0,100\n", "line 2"),
        (HEADER + "0,100,ten\n", "line 2.*output_tokens"),
        (HEADER + "0,100,10\n1,900000000,10\n", "never fit|prompt_tokens"),
        ("a,b\n1,2\n", "columns"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "import"])
def test_malformed_requests(refuse, text, message, command):
    Path("bad.csv").write_text(text)
    args = {
        "simulate": ("simulate", "--workload", "bad.csv", *OUT),
        "import": ("workload", "import", "bad.csv", "--out", "good.csv"),
    }[command]
    if command == "import" and "900000000" in text:
        pytest.skip("a table may hold what a cluster cannot")
    found = refuse(*args)
    assert re.search(message, found), found


def test_results_that_cannot_be_written_are_refused_first(refuse):
    Path("folder.json").mkdir()
    assert "must end in .csv or .parquet" in refuse("simulate", *QUICK, "-o", "out.txt")
    assert "there is no folder sub" in refuse("simulate", *QUICK, "-o", "sub/out.csv")
    assert "it is a folder" in refuse("simulate", *QUICK, "--trace", "folder.json", "-o", "x.csv")


def test_bad_policy_files(refuse):
    Path("empty.py").write_text("")
    Path("broken.py").write_text("def scores(view):\n    return 3\n")
    assert "holds no policy" in refuse("simulate", *QUICK, "-p", "empty.py")
    assert "one score per replica" in refuse("simulate", *QUICK, "-p", "broken.py", *OUT)
    assert "no policy file none.py" in refuse("simulate", *QUICK, "-p", "none.py")


@pytest.mark.parametrize("args", [(), ("workload",)])
def test_no_command_shows_the_help(run, args):
    assert run(*args, code=2).stderr.startswith("Usage: tailrace ")


def test_an_interrupt_exits_with_130(run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tailrace.evaluate.runner.simulate", interrupted)
    result = run("simulate", *QUICK, *OUT, code=130)
    assert result.stderr.strip() == "interrupted"
    assert not Path("out.csv").exists()


def test_a_bug_keeps_its_trace(run, monkeypatch):
    monkeypatch.setattr("tailrace.evaluate.runner.simulate", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("simulate", *QUICK)


def test_no_two_options_share_a_name():
    for name in ("simulate", "compare", "capacity"):
        command = cli.get_command(click.Context(cli), name)
        options = [o for p in command.params for o in (*p.opts, *p.secondary_opts)]
        assert len(options) == len(set(options))
