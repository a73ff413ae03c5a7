import re
from pathlib import Path

import click
import pytest

from tailrace.cli import cli

QUICK = ("--requests", "60", "--rate", "20")
HUGE = 99999999999999999999
LAST_SEEDS = ("--seed", 2**63 - 1, "--seeds", 2, "--jobs", 1, "-p", "random")
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
        (["simulate", "--device", "a100-lama3"], "unknown device 'a100-lama3'; did you mean "),
        (["simulate", "--scheduler", "sarati"], "'sarati' is not one of"),
        (["simulate", "--requests", "many"], "'many' is not a valid int"),
        (["simulate", "--requests", 0], "workload.requests: .*greater than or equal to 1, got 0"),
        (["simulate", "--requests", -5], "workload.requests: .*got -5"),
        (["simulate", "--requests", 10**9], "workload.requests: .*less than or equal to 50000000"),
        (["simulate", "--rate", -1], "workload.rate: .*greater than or equal to .*, got -1.0"),
        (["simulate", "--rate", 1e-12], "workload.rate: .*greater than or equal to .*, got 1e-12"),
        (["simulate", "--rate", 1e308], "workload.rate: .*equal to 10000000, got 1e.308"),
        (["simulate", "--load", 1e-9, "--set", "capacity_rps=10"],
         "a load of 1e-09 comes to 1e-08 requests/s; a rate must be from"),
        (["simulate", "--speed", 1e-9], "cluster.replicas.0.speed: .*equal to 0.001, got 1e-09"),
        (["simulate", "--time-scale", 1e-9], "workload.time_scale: .*got 1e-09"),
        (["simulate", "--arrival-cv", 1e9], "workload.arrival_cv: .*equal to 1000, got"),
        (["simulate", "--staleness-s", 1e-9], "staleness_s: must be 0 .*0.001, got 1e-09"),
        (["simulate", "--staleness-s", 1e9], "router.staleness_s: .*less than or equal to 1000000"),
        (["simulate", "--staleness-s", "nan"], "router.staleness_s: .*finite number, got nan"),
        (["simulate", "--watermark", "nan"], "watermark: .*finite number, got nan"),
        (["simulate", "--predictor-sigma", "nan"], "predictor_sigma: .*finite number, got nan"),
        (["simulate", "--set", "events=[{at_s=1e300,replica=0,kind='die'}]"], "at_s: .*1000000000"),
        (["simulate", "--set", "events=[{at_s=1,replica=0,kind='slow',factor=nan}]"],
         "events.0.factor: .*finite number, got nan"),
        (["simulate", "--set", "events=[{at_s=1,replica=0,kind='slow',factor=1e-9}]"],
         "events.0.factor: .*equal to 0.001, got 1e-09"),
        (["simulate", "--rate", 1, "--load", 0.5], "--rate and --load both say how much traffic"),
        (["simulate", "--time-scale", 0.5], "--time-scale .*'chat' is a built-in workload"),
        (["workload", "stats", "chat", "--time-scale", 0.5], "'chat' is a built-in workload"),
        (["simulate", "--workload", "x.csv", "--time-scale", 2, "--arrivals", "poisson"],
         "--arrivals poisson replaces them"),
        (["simulate", "--workload", "x.csv", "--time-scale", 2, "--rate", 5],
         "--time-scale and a rate both set the pace"),
        (["simulate", "--arrivals", "trace"], "native, poisson, gamma, mmpp, diurnal, onoff.,"),
        (["capacity", "--rate", 5], "capacity looks for the rate itself; leave --rate out"),
        (["capacity", "--load", 0.5], "capacity looks for the load itself; leave --load out"),
        (["simulate", "--rate", "nan"], "workload.rate: .*finite number, got nan"),
        (["simulate", "--load", "nan"], "workload.load: .*finite number, got nan"),
        (["simulate", "--replicas", 0], "cluster.replicas.0.count: .*got 0"),
        (["simulate", "--replicas", 2000], "cluster.replicas.0.count: .*1024, got 2000"),
        (["simulate", "--set", "cluster.replicas=[]"], "cluster.replicas: .*at least 1 item"),
        (["simulate", "--speed", 0], "cluster.replicas.0.speed: .*got 0.0"),
        (["simulate", "--watermark", 1.5], "cluster.replicas.0.watermark: .*got 1.5"),
        (["simulate", "--seed", -1], "-1 is not in the range 0<=x<=9223372036854775807"),
        (["simulate", "--seed", HUGE], "99999999999999999999 is not in the range"),
        (["compare", "--seed", HUGE], "99999999999999999999 is not in the range"),
        (["capacity", "--seed", HUGE], "99999999999999999999 is not in the range"),
        (["workload", "stats", "chat", "--seed", HUGE], "99999999999999999999 is not in the range"),
        (["compare", *QUICK, *LAST_SEEDS], "a seed must be at most 9223372036854775807, got 9"),
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
        (["devices", "a41"], "unknown device 'a41'"),
        (["features", "queue"], "unknown feature 'queue'"),
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
        (
            HEADER + "0,100,10\n2,100,10\n1,100,10\n",
            "line 4.*before the request above it; .*`tailrace workload import --sort`",
        ),
        (HEADER + "0,100,10\nnan,100,10\n", "line 3.*arrival_s"),
        (HEADER + "0,100,10\n1,-100,10\n", "line 3.*prompt_tokens"),
        (HEADER + "0,100,0\n", "line 2.*output_tokens"),
        (HEADER + "0,100\n", "line 2"),
        (HEADER + "0,100,ten\n", "line 2.*output_tokens"),
        (HEADER + "0,100,10\n1,900000000,10\n", "line 3.*prompt_tokens: must be at most 16777216"),
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
    found = refuse(*args)
    assert re.search(message, found), found


def test_a_table_may_hold_what_a_cluster_cannot(run, refuse):
    Path("long.csv").write_text(HEADER + "0,100,10\n1,9000000,10\n")
    run("workload", "import", "long.csv", "--out", "good.csv")
    assert "may need 562501 KV blocks" in refuse(
        "simulate", "--workload", "good.csv", "--rate", 20, *OUT
    )


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


RAISES = "def scores(view):\n    raise ValueError('boom')\n"
MISTAKES = [
    (RAISES, r"policy mine failed: ValueError: boom \(mine.py, line 2\)$"),
    (
        "def scores(view):\n    return view.loads\n",
        r"AttributeError: .*loads.* \(mine.py, line 2\)$",
    ),
    (
        "def scores(view):\n    return view.replicas['x']\n",
        r"no field of name x \(mine.py, line 2\)",
    ),
    ("import sys\ndef scores(view):\n    sys.exit(0)\n", r"SystemExit: 0 \(mine.py, line 3\)$"),
    ("def scores():\n    return 0\n", r"policy mine failed: TypeError: scores\(\) takes 0"),
    ("import sys\nsys.exit('no')\n", r"policy mine.py failed: SystemExit: no \(mine.py, line 2\)$"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_in_a_policy_file(refuse, text, message):
    Path("mine.py").write_text(text)
    found = refuse("simulate", *QUICK, "-p", "mine.py", *OUT)
    assert re.search(message, found), found


def test_something_importable_that_is_no_policy(refuse):
    message = refuse("simulate", *QUICK, "-p", "os:getcwd")
    assert message.startswith("policy os:getcwd failed: TypeError: ")


@pytest.mark.parametrize("jobs", [1, 2])
def test_mistakes_in_a_policy_file_from_any_process(refuse, jobs):
    Path("mine.py").write_text(RAISES)
    args = ("compare", *QUICK, "--seeds", 1, "--jobs", jobs, "-p", "mine.py", "--json")
    assert refuse(*args) == "policy mine failed: ValueError: boom (mine.py, line 2)"


def test_a_policy_file_takes_no_parameters_in_its_name(refuse):
    Path("mine.py").write_text("def scores(view, w=1):\n    return view.replicas['speed'] * w\n")
    for name in ("mine.py:w=3", "mine.py:scores:w=3"):
        assert "a policy file takes no parameters on the command line" in refuse(
            "simulate", *QUICK, "-p", name
        )


@pytest.mark.parametrize("args", [("simulate",), ("compare", "--seeds", 1, "--jobs", 1)])
def test_what_a_policy_prints_is_no_result(run_json, args):
    Path("mine.py").write_text(
        "print('loaded')\ndef scores(view):\n    print('hi')\n    return view.replicas['speed']\n"
    )
    run_json(*args, *QUICK, "-p", "mine.py")


def test_a_file_without_arrivals_offers_only_what_the_flag_accepts(refuse):
    Path("mine.csv").write_text("prompt_tokens,output_tokens\n10,20\n")
    message = refuse("simulate", "--workload", "mine.csv")
    assert message.endswith("set arrivals to a process: poisson, gamma, mmpp, diurnal, onoff")


@pytest.mark.parametrize("args", [(), ("workload",)])
def test_no_command_shows_the_help(run, args):
    assert run(*args, code=2).stderr.startswith("Usage: tailrace ")


def test_an_interrupt_exits_with_130(run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tailrace.evaluate.measure.runner.simulate", interrupted)
    result = run("simulate", *QUICK, *OUT, code=130)
    assert result.stderr.strip() == "interrupted"
    assert not Path("out.csv").exists()


def test_a_bug_keeps_its_trace(run, monkeypatch):
    monkeypatch.setattr("tailrace.evaluate.measure.runner.simulate", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("simulate", *QUICK)


def test_no_two_options_share_a_name():
    for name in ("simulate", "compare", "capacity"):
        command = cli.get_command(click.Context(cli), name)
        options = [o for p in command.params for o in (*p.opts, *p.secondary_opts)]
        assert len(options) == len(set(options))
