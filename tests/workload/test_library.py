"""Built-in workloads: published figures, exact counts, determinism, and errors that help."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from tailrace import config
from tailrace.errors import TailraceError
from tailrace.workload import library
from tailrace.workload.classes import are_distinct
from tailrace.workload.stats import gap_cv, index_of_dispersion
from tailrace.workload.table import RequestTable
from workload import naive

CLASSED = [name for name in library.names() if library.classes_of(name)]
each_workload = pytest.mark.parametrize("name", library.names())

LEVELS = (5, 25, 50, 75, 90, 95, 99)
#: Prompt and output quantiles of the traces, their means, and the largest relative error of the
#: generator that its authors published for each quantile (plus 5 % for the sample).
PUBLISHED = {
    "chat": (
        (181, 396, 1020, 1189, 2734, 4083, 4142),
        (41, 85, 129, 395, 424, 451, 601),
        (1154.7, 211.1),
        (0.14, 0.21),
    ),
    "chat-oneshot": (
        (7, 16, 35, 143, 761, 1423, 2862),
        (23, 136, 286, 446, 681, 839, 1000),
        (245.8, 325.6),
        (0.21, 0.14),
    ),
    "code-completion": (
        (75, 578, 1469, 2744, 5188, 7303, 7436),
        (6, 9, 13, 24, 55, 90, 251),
        (2047.8, 27.9),
        (0.12, 0.1),
    ),
    "summarise-long": (
        (749, 1986, 2730, 3370, 3702, 3813, 3933),
        (60, 115, 167, 242, 372, 736, 3271),
        (2588.1, 291.4),
        (0.08, 0.21),
    ),
    "multi-turn-chat": (
        (901, 2306, 6909, 15367, 27367, 39550, 85400),
        (10, 156, 350, 472, 597, 698, 1119),
        (12035.1, 342.6),
        (0.2, 0.15),
    ),
    "doc-qa": (
        (22, 277, 11587, 23175, 38611, 48905, 66456),
        (2, 11, 69, 250, 389, 519, 768),
        (15325.5, 149.1),
        (0.25, 0.55),  # its 5 % of outputs is 2 tokens, which one token puts off by half
    ),
    "reasoning": (
        (13, 41, 208, 482, 2092, 6714, 23423),
        (225, 427, 792, 1499, 3432, 5701, 12607),
        (1268.2, 1527.4),
        (0.13, 0.09),
    ),
}


def make(name: str, requests: int, seed: int = 1, **options: object) -> RequestTable:
    return library.make(name, requests, None, seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_match_the_trace(name: str) -> None:
    rows = make(name, 60_000).rows
    prompt_q, output_q, means, tolerances = PUBLISHED[name]
    for column, expected, tolerance in (
        ("prompt_tokens", prompt_q, tolerances[0]),
        ("output_tokens", output_q, tolerances[1]),
    ):
        assert np.percentile(rows[column], LEVELS) == pytest.approx(expected, rel=tolerance)
    got = (rows["prompt_tokens"].mean(), rows["output_tokens"].mean())
    assert got == pytest.approx(means, rel=0.06)


@pytest.mark.parametrize(
    ("name", "spearman"),
    [("chat", 0.073), ("chat-oneshot", 0.138), ("doc-qa", -0.517), ("reasoning", -0.381)],
)
def test_prompt_and_output_depend_on_each_other_as_in_the_trace(name: str, spearman: float) -> None:
    rows = make(name, 30_000).rows
    got = scipy_stats.spearmanr(rows["prompt_tokens"], rows["output_tokens"]).statistic
    assert got == pytest.approx(spearman, abs=0.03)


@pytest.mark.parametrize(
    ("name", "requests", "cv", "idc_1s", "idc_10s", "idc_60s"),
    [
        ("chat", 19_366, (1.0, 1.12), (1.2, 1.5), (3.3, 5.5), (12, 27)),
        ("chat-bursty", 19_366, (2.3, 2.6), (5.5, 6.5), (17, 24), (48, 85)),
        ("code-completion", 8819, (11, 17), (11, 15), (60, 90), (120, 260)),
        ("reasoning", 30_000, (1.9, 2.1), (3.6, 4.2), (3.5, 4.5), (3.0, 5.5)),
        ("summarise-long", 20_000, (0.97, 1.03), (0.95, 1.05), (0.9, 1.1), (0.7, 1.3)),
        ("multi-turn-chat", 12_031, (0.97, 1.03), (0.95, 1.05), (0.9, 1.2), (0.8, 1.5)),
    ],
)
def test_arrivals_are_as_bursty_as_published(
    name: str,
    requests: int,
    cv: tuple[float, float],
    idc_1s: tuple[float, float],
    idc_10s: tuple[float, float],
    idc_60s: tuple[float, float],
) -> None:
    samples = [make(name, requests, seed).rows["arrival_s"] for seed in range(6)]
    assert cv[0] < np.median([gap_cv(s) for s in samples]) < cv[1]
    for window, (low, high) in ((1, idc_1s), (10, idc_10s), (60, idc_60s)):
        assert low < np.median([index_of_dispersion(s, window) for s in samples]) < high


@pytest.mark.parametrize(
    ("name", "requests", "low", "high"),
    # Traces: 0.366, 0.640, 0.836. A window cuts some groups of doc-qa, which costs it hits.
    [
        ("multi-turn-chat", 12_031, 0.33, 0.40),
        ("doc-qa", 8000, 0.58, 0.68),
        ("tool-agents", 514, 0.81, 0.86),
    ],
)
def test_prefixes_repeat_as_in_the_trace(name: str, requests: int, low: float, high: float) -> None:
    assert low < naive.block_hit_rate(make(name, requests), block=512) < high


@each_workload
def test_exactly_as_many_requests_as_asked_for(name: str) -> None:
    for requests in (1, 7, 1000):
        table = make(name, requests)
        assert len(table) == requests
        table.validate()


@each_workload
def test_same_seed_same_bytes(name: str) -> None:
    first, again, other = make(name, 500, 2), make(name, 500, 2), make(name, 500, 3)
    assert first.rows.tobytes() == again.rows.tobytes()
    assert first.runs.tobytes() == again.runs.tobytes()
    assert first.rows.tobytes() != other.rows.tobytes()


@each_workload
def test_rate_is_the_rate_of_requests(name: str) -> None:
    # Rates that wander over minutes average out only in hours.
    wanders = name in ("chat", "chat-bursty", "code-completion", *CLASSED)
    requests = 50_000 if wanders else 12_000
    spec = library.describe(name)
    for rate in (spec.default_rate_rps, 0.5 * spec.default_rate_rps):
        spans = [library.make(name, requests, rate, s).rows["arrival_s"][-1] for s in range(4)]
        tolerance = 0.1 if wanders else 0.06
        assert 4 * requests / sum(spans) == pytest.approx(rate, rel=tolerance)


@pytest.mark.parametrize(
    "name",
    ["chat", "chat-bursty", "code-completion", "tool-agents", "rag", "reasoning"],
)
def test_lengths_and_content_do_not_change_with_the_rate_or_the_arrivals(name: str) -> None:
    slow, fast = library.make(name, 3000, 1.0, 5), library.make(name, 3000, 20.0, 5)
    other = library.make(name, 3000, 20.0, 5, arrivals="gamma")
    for table in (fast, other):
        for column in ("prompt_tokens", "output_tokens", "run_count"):
            assert np.array_equal(slow.rows[column], table.rows[column])
        assert np.array_equal(slow.runs, table.runs)
    assert not np.allclose(slow.rows["arrival_s"], 20 * fast.rows["arrival_s"][0])


@each_workload
def test_more_requests_begin_with_the_same_requests(name: str) -> None:
    few, many = make(name, 300), make(name, 2000)
    for column in ("prompt_tokens", "output_tokens", "arrival_s", "parent", "think_s"):
        assert np.array_equal(few.rows[column][:280], many.rows[column][:280]), column


@each_workload
def test_a_segment_has_one_place_in_prompts(name: str) -> None:
    # Two streams under one number would almost surely stand at two distances from the start.
    table = make(name, 20_000)
    before = np.zeros(len(table.runs), np.int64)
    for row in table.rows:
        runs = slice(row["run_start"], row["run_start"] + row["run_count"])
        before[runs] = np.cumsum(table.runs["tokens"][runs]) - table.runs["tokens"][runs]
    order = np.argsort(table.runs["segment"], kind="stable")
    segment, offset = table.runs["segment"][order], before[order]
    same = segment[1:] == segment[:-1]
    assert (offset[1:] == offset[:-1])[same].all()


def test_rag_shares_prompts_by_popularity() -> None:
    table = make("rag", 30_000)
    assert (table.rows["run_count"] == 2).all()
    first = table.rows["run_start"]
    shared, tokens = table.runs["segment"][first], table.runs["tokens"][first]
    uses = np.sort(np.bincount(shared))[::-1]
    assert len(uses) == 64
    assert uses[0] / uses[9] == pytest.approx(10, rel=0.2)
    assert tokens.min() >= 1000
    assert tokens.max() <= 4000
    # One prompt, one length.
    assert len({(s, t) for s, t in zip(shared.tolist(), tokens.tolist(), strict=True)}) == 64
    assert np.median(table.runs["tokens"][first + 1]) == pytest.approx(120, rel=0.05)


def test_doc_qa_asks_again_about_the_same_document() -> None:
    table = make("doc-qa", 40_000)
    rows, runs = table.rows, table.runs
    asked = rows["run_count"] == 2
    assert asked.mean() == pytest.approx(0.5485, abs=0.02)
    assert (rows["session"] == -1).all()
    _, uses = np.unique(runs["segment"][rows["run_start"][asked]], return_counts=True)
    assert uses.mean() == pytest.approx(5.37, rel=0.05)
    short = rows["prompt_tokens"][~asked] < 512
    assert short.mean() == pytest.approx(0.269 / (0.269 + 0.1826), abs=0.02)


def test_tool_agents_families() -> None:
    rows, runs = make("tool-agents", 20_000).rows, make("tool-agents", 20_000).runs
    shared = runs["tokens"][rows["run_start"]]
    assert set(shared.tolist()) == {6144, 2560}
    assert (shared == 6144).mean() == pytest.approx(0.702, abs=0.01)
    assert (rows["output_tokens"][shared == 6144] == 3).mean() == pytest.approx(0.612, abs=0.02)


def test_mixed_has_its_shares() -> None:
    rows = make("mixed", 60_000).rows
    assert (rows["session"] >= 0).mean() == pytest.approx(0.15, abs=0.01)
    assert ((rows["run_count"] > 0) & (rows["session"] < 0)).mean() == pytest.approx(0.1, abs=0.01)


def test_a_mixture_of_ones_own() -> None:
    spec = library.mixture("mine", {"sessions-hot": 3, "tool-agents": 1})
    rows = library.make(spec, 20_000, 10.0, 1).rows
    assert (rows["session"] >= 0).mean() == pytest.approx(0.75, abs=0.02)
    assert 20_000 / rows["arrival_s"][-1] == pytest.approx(10, rel=0.06)


def test_no_part_of_a_mixture_runs_dry() -> None:
    # Silences of minutes: the code part must reach as far as the other, however few it sends.
    spec = library.mixture("mine", {"code-completion": 1, "chat-oneshot": 1})
    for seed in range(8):
        few, many = (library.make(spec, n, 2.0, seed).rows["prompt_tokens"] for n in (400, 4000))
        assert np.array_equal(few[:390], many[:390])


def test_a_mixture_of_a_mixture() -> None:
    spec = library.mixture("mine", {"mixed": 1, "tool-agents": 1})
    rows = library.make(spec, 20_000, 10.0, 1).rows
    shared = (rows["run_count"] > 0) & (rows["session"] < 0)
    assert shared.mean() == pytest.approx(0.55, abs=0.02)


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [("poisson", 1.0), ("gamma", 3.0), ("cox", 1.06), ("onoff", 14), ("mmpp", 3.4), ("pool", 1.25)],
)
def test_arrivals_can_be_replaced(arrivals: str, cv: float) -> None:
    rows = library.make("code-completion", 20_000, 2.5, 1, arrivals=arrivals, arrival_cv=3.0).rows
    assert gap_cv(rows["arrival_s"]) == pytest.approx(cv, rel=0.2)


def test_a_mixture_follows_one_replaced_process_as_a_whole() -> None:
    # Seven parts with bursts of their own would even each other out.
    rows = library.make("mixed", 30_000, 5.0, 1, arrivals="gamma", arrival_cv=4.0).rows
    roots = rows["arrival_s"][rows["turn"] == 0]
    assert gap_cv(roots) == pytest.approx(4.0, rel=0.15)


def test_diurnal_runs_through_one_day_in_a_short_table() -> None:
    arrival_s = library.make("chat", 24_000, 10.0, 1, arrivals="diurnal").rows["arrival_s"]
    hours = np.histogram(arrival_s, bins=24, range=(0, 2400))[0] / 1000
    assert hours.max() == pytest.approx(2.0, abs=0.25)  # 2.19 at its hour's middle
    assert hours.min() < 0.7
    assert arrival_s[-1] == pytest.approx(2400, rel=0.03)


def test_slos_are_set() -> None:
    rows = make("chat", 10, ttft_slo_s=0.3, tpot_slo_s=0.02).rows
    assert set(rows["ttft_slo_s"]) == {0.3}
    assert set(rows["tpot_slo_s"]) == {0.02}


@pytest.mark.parametrize("name", ["multi-turn-chat", "doc-qa", "sessions-hot", "mixed"])
def test_extreme_rates_take_work_in_proportion_to_the_table(name: str) -> None:
    for rate in (1e6, 0.01):
        assert len(library.make(name, 500, rate, 1)) == 500


def test_unknown_names_say_what_is_near() -> None:
    with pytest.raises(TailraceError, match="unknown workload 'chatt'; did you mean chat"):
        library.make("chatt", 10, 1.0, 1)
    with pytest.raises(
        TailraceError, match="unknown arrival process 'poison'; did you mean poisson"
    ):
        library.make("chat", 10, 1.0, 1, arrivals="poison")
    with pytest.raises(TailraceError, match="unknown workload 'rags'; did you mean rag"):
        library.mixture("mine", {"rags": 1.0})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"rate": 0.0}, "rate must be a positive number"),
        ({"rate": float("nan")}, "rate must be a positive number"),
        ({"rate": float("inf")}, "rate must be a positive number"),
        ({"arrivals": "gamma", "arrival_cv": -1.0}, "arrival_cv must be positive"),
        ({"arrivals": "trace"}, "workload 'chat' has no recorded arrivals"),
        ({"seed": -1}, "a seed must not be negative"),
    ],
)
def test_bad_requests_are_refused(change: dict[str, object], complaint: str) -> None:
    arguments = {"name": "chat", "requests": 10, "rate": 1.0, "seed": 1} | change
    with pytest.raises(TailraceError, match=complaint):
        library.make(**arguments)  # type: ignore[arg-type]


def test_bad_mixtures_are_refused() -> None:
    with pytest.raises(TailraceError, match="at least one workload"):
        library.mixture("mine", {})
    with pytest.raises(TailraceError, match="share of chat must be positive"):
        library.mixture("mine", {"chat": 0.0})


@each_workload
def test_every_workload_is_described(name: str) -> None:
    spec = library.describe(name)
    assert spec.name == name
    assert spec.description.endswith(".")
    assert spec.source
    assert spec.default_rate_rps > 0
    assert f"| `{name}` |" in (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()


@pytest.mark.parametrize("name", library.names())
def test_no_request_is_longer_than_its_workload_allows(name: str) -> None:
    for scale in (0.1, 1.0, 3.0):
        rows = library.make(name, 3000, None, 5, prompt_scale=scale).rows
        longest = (rows["prompt_tokens"] + rows["output_tokens"]).max()
        assert longest <= library.max_tokens(name, scale)


def test_longer_pauses_leave_the_rate_and_the_turns_alone() -> None:
    plain, slow = (library.make("sessions-hot", 20_000, 8.0, 3, think_scale=s) for s in (1.0, 5.0))
    later = plain.rows["turn"] > 0, slow.rows["turn"] > 0
    means = [t.rows["think_s"][on].mean() for t, on in zip((plain, slow), later, strict=True)]
    assert means[1] / means[0] == pytest.approx(5.0, rel=0.1)
    assert later[1].mean() == pytest.approx(later[0].mean(), abs=0.03)
    assert slow.rows["arrival_s"].max() == pytest.approx(20_000 / 8.0, rel=0.1)


def test_requests_without_session_ids_still_follow_each_other() -> None:
    settings = config.Workload(name="sessions-hot", requests=2000, session_ids=False)
    rows = library.from_settings(settings, 8.0, 3).rows
    assert (rows["session"] == -1).all()
    assert (rows["turn"] == 0).all()
    assert (rows["parent"] >= 0).any()


def test_coding_agents_are_as_long_as_recordings_of_them() -> None:
    """Recordings have a median of 100 000 tokens, a 99th percentile of 500 000, pauses of 10 s."""
    rows = library.make("coding-agents", 20_000, 4.0, 7).rows
    median, high = np.percentile(rows["prompt_tokens"], [50, 99])
    assert 70_000 < median < 130_000
    assert 400_000 < high <= 500_000
    pauses = np.percentile(rows["think_s"][rows["turn"] > 0], [50, 75, 90])
    assert pauses == pytest.approx([10, 33, 110], rel=0.3)
    assert np.median(rows["output_tokens"]) == pytest.approx(216, rel=0.3)


@pytest.mark.parametrize("name", CLASSED)
def test_classes_have_their_shares_targets_and_clients(name: str) -> None:
    spec, rows = library.describe(name), library.make(name, 8000, None, 3, ttft_slo_s=7.0).rows
    assert are_distinct(spec.classes)
    assert not (rows["ttft_slo_s"] == 7.0).any()  # targets are those of the classes
    shares = {part.request_class: part.weight for part in spec.parts}
    assert sum(shares.values()) == pytest.approx(1.0)
    found = {one: one.members(rows) for one in spec.classes}
    assert sum(found.values()).tolist() == [1] * len(rows)
    for one, member in found.items():
        # Bursts of code come and go over minutes.
        assert member.mean() == pytest.approx(shares[one], abs=0.15)
