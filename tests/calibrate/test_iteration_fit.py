"""The profiles below have the columns of Vidur's files and come from a known cost model."""

import csv
import lzma
import math

import numpy as np
import pytest

from tailrace.calibrate.iteration_fit import (
    KNOT_GRID,
    MIN_BASE_MS,
    REGIMES,
    fit_iterations,
    fit_profiles,
    predicted_ms,
    regimes_of,
)
from tailrace.config import CostModel
from tailrace.errors import TailraceError
from tailrace.view import devices
from tailrace.view.cost_model import cost_rows, iteration_s

LAYERS = 32
TRUTH = devices.get("a100-llama3-8b").cost
OPERATORS = {  # share of the token part; the optional ones are 0.2 of it
    "input_layernorm": 0.05,
    "attn_pre_proj": 0.15,
    "attn_rope": 0.05,
    "attn_post_proj": 0.1,
    "post_attention_layernorm": 0.05,
    "mlp_up_proj": 0.3,
    "mlp_act": 0.05,
    "mlp_down_proj": 0.15,
    "add": 0.1,
}
SHAPE = {"n_kv_head": 32, "n_embd": 4096, "num_tensor_parallel_workers": 1}
TOKENS = (*range(1, 8), *range(8, 4097, 8))


def times(name, ms):
    """The statistics of one operator; only the median may be used."""
    return {
        f"time_stats.{name}.min": ms / 2,
        f"time_stats.{name}.mean": 3 * ms,
        f"time_stats.{name}.median": ms,
    }


def mlp_rows(model=TRUTH, layers=LAYERS, **shape):
    for tokens in reversed(TOKENS):
        ms = float(predicted_ms(model, tokens, 0, 0)) / layers
        row = times("emb", 1e3)
        for name, share in OPERATORS.items():
            row |= times(name, share * ms)
        yield row | {"n_head": 32, **SHAPE, "num_tokens": tokens} | shape


def attention_rows(model=TRUTH, layers=LAYERS, overhead=0.0, **shape):
    common = {"n_q_head": 32, **SHAPE, "block_size": 16} | shape
    for chunk in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        for before in (0, 512, 2048, 8192):
            ms = model.per_prefill_ms * chunk * (before + chunk / 2) / layers
            sizes = {"batch_size": 1, "prefill_chunk_size": chunk, "kv_cache_size": before}
            decode = dict.fromkeys(times("attn_decode", 0.0), "")
            yield times("attn_prefill", ms) | decode | common | sizes | {"is_prefill": True}
    for batch in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256):
        for before in (32, 256, 1024, 2048, 4096):
            ms = model.per_context_ms * batch * before / layers
            ms /= 1.0 + overhead if batch > 1 else 1.0
            sizes = {"batch_size": batch, "prefill_chunk_size": 0, "kv_cache_size": before}
            prefill = dict.fromkeys(times("attn_prefill", 0.0), "")
            yield prefill | times("attn_decode", ms) | common | sizes | {"is_prefill": False}


def write(path, rows):
    rows = list(rows)
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def profiles(folder, **shape):
    return (
        write(folder / "mlp.csv", mlp_rows(**shape)),
        write(folder / "attention.csv", attention_rows(**shape)),
    )


def iterations(n=3000, chunks=(0, 0, 64, 300, 512, 1500, 3000)):
    """Random decode, prefill and mixed iterations: T, K, W."""
    rng = np.random.default_rng(0)
    decodes = rng.integers(0, 129, n)
    chunk = rng.choice(chunks, n)
    decodes[(decodes == 0) & (chunk == 0)] = 1
    context = decodes * rng.integers(10, 3000, n)
    return decodes + chunk, context, chunk * (rng.integers(0, 4000, n) + chunk / 2)


def assert_same(model, truth, rel):
    assert [knot for knot, _ in model.knots] == [knot for knot, _ in truth.knots]
    for found, true in zip(model.knots, truth.knots, strict=True):
        assert found[1] == pytest.approx(true[1], rel=rel)
    for name in ("base_ms", "per_token_ms", "per_context_ms", "per_prefill_ms"):
        assert getattr(model, name) == pytest.approx(getattr(truth, name), rel=rel), name


def test_prediction_is_the_simulators():
    tokens, context, work = iterations(50)
    row = cost_rows([TRUTH])[0]
    expected = [iteration_s(row, *x, 1.0) for x in np.transpose([tokens, context, work])]
    assert predicted_ms(TRUTH, tokens, context, work) == pytest.approx(np.array(expected) * 1e3)


def test_regimes():
    tokens = np.array([32.0, 33.0, 512.0, 513.0, 100.0])
    context = np.array([10.0, 0.0, 0.0, 0.0, 1.0])
    work = np.array([0.0, 0.0, 1.0, 1.0, 1.0])
    assert [REGIMES[k] for k in regimes_of(tokens, context, work)] == list(REGIMES)


@pytest.mark.parametrize("name", devices.names())
def test_iterations_give_back_every_preset(name):
    truth = devices.get(name).cost
    data = iterations()
    result = fit_iterations(*data, predicted_ms(truth, *data))
    assert_same(result.model, truth, 1e-6)
    assert max(error.max for error in result.errors.values()) < 1e-9
    assert result.undetermined == ()


def test_four_knots_are_found():
    truth = CostModel(
        base_ms=5.0,
        per_token_ms=0.01,
        knots=((64, 0.01), (256, 0.02), (1024, 0.03), (2048, 0.04)),
        per_context_ms=1e-4,
        per_prefill_ms=1e-6,
    )
    data = iterations(chunks=range(0, 4000, 50))
    assert_same(fit_iterations(*data, predicted_ms(truth, *data)).model, truth, 1e-6)


def test_noise_is_not_fitted():
    data = iterations(8000)
    rng = np.random.default_rng(1)
    ms = predicted_ms(TRUTH, *data) * rng.normal(1.0, 0.03, len(data[0]))
    result = fit_iterations(*data, ms)
    assert len(result.model.knots) <= 2
    assert result.model.base_ms == pytest.approx(TRUTH.base_ms, rel=0.05)
    assert result.model.per_context_ms == pytest.approx(TRUTH.per_context_ms, rel=0.05)
    assert result.model.per_prefill_ms == pytest.approx(TRUTH.per_prefill_ms, rel=0.05)
    for error in result.errors.values():
        # mean of |N(0, 3 %)| = 2.4 %
        assert error.mean == pytest.approx(0.024, rel=0.25)
        assert error.max < 0.2


def test_relative_errors_count():
    """Half the iterations are tiny: plain least squares would sacrifice them to the large ones."""
    tokens = np.array([1.0, 2.0] * 50 + [4000.0, 4096.0] * 50)
    ms = np.where(tokens > 100, 0.1 * tokens**1.05, 1.0)
    zeros = np.zeros_like(tokens)
    result = fit_iterations(tokens, zeros, zeros, ms, max_knots=0)
    assert result.errors["decode_small"].max < 0.2


def test_balance_lets_the_rare_regime_count():
    tokens, context, work = iterations()
    ms = predicted_ms(TRUTH, tokens, context, work)
    ms = np.where((context == 0) & (work > 0), 1.3 * ms, ms)
    plain = fit_iterations(tokens, context, work, ms)
    balanced = fit_iterations(tokens, context, work, ms, balance=True)
    assert plain.errors["prefill_short"].count < 100
    assert balanced.errors["prefill_short"].mean < plain.errors["prefill_short"].mean
    # and however often a regime was measured, the result is the same
    often = np.where((context == 0) & (work > 0), 9, 1)
    again = fit_iterations(
        *(np.repeat(column, often) for column in (tokens, context, work, ms)), balance=True
    )
    assert_same(again.model, balanced.model, 1e-6)


def test_max_knots_is_kept():
    data = iterations()
    result = fit_iterations(*data, predicted_ms(TRUTH, *data), max_knots=1)
    assert len(result.model.knots) == 1
    assert result.model.knots[0][0] in KNOT_GRID


def test_what_the_data_do_not_say_is_named():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 100, 300)
    zeros = np.zeros(300)
    result = fit_iterations(tokens, tokens * 100, zeros, 10.0 + 0.1 * tokens)
    assert result.undetermined == ("per_token_ms", "per_context_ms", "per_prefill_ms")
    assert set(result.errors) == {"decode_small", "decode_large"}
    constant = fit_iterations([5, 5, 5], [9, 20, 3], [0, 0, 0], [3.0, 3.1, 2.9])
    assert constant.undetermined == ("base_ms", "per_token_ms", "per_prefill_ms")


def test_base_stays_positive_and_coefficients_non_negative():
    tokens = np.arange(1.0, 200.0)
    zeros = np.zeros_like(tokens)
    proportional = fit_iterations(tokens, zeros, zeros, 0.1 * tokens).model
    assert proportional.base_ms == MIN_BASE_MS
    falling = fit_iterations(tokens, zeros, zeros, 50.0 - 0.1 * tokens).model
    assert falling.per_token_ms == 0.0
    assert falling.knots == ()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([], [], [], []), "at least one iteration"),
        (([1, 2], [0], [0], [1]), r"tokens \(2,\)"),
        (([1, 0], [0, 0], [0, 0], [1, 1]), "tokens of iteration 1 is 0"),
        (([1], [-1], [0], [1]), "context of iteration 0 is -1"),
        (([1], [0], [math.nan], [1]), "prefill_work of iteration 0 is nan"),
        (([1], [0], [0], [0]), "ms of iteration 0 is 0"),
    ],
)
def test_bad_iterations(columns, message):
    with pytest.raises(TailraceError, match=message):
        fit_iterations(*columns)


def test_profiles_give_back_the_model(tmp_path):
    result = fit_profiles(*profiles(tmp_path), layers=LAYERS)
    assert_same(result.model, TRUTH, 1e-6)
    assert set(result.errors) == set(REGIMES)
    assert result.errors["prefill_short"].count == 5 * 4
    assert result.errors["prefill_long"].count == 3 * 4
    assert result.errors["decode_small"].count == 6 * 5
    assert result.errors["mixed"].count > 1000


def test_profiles_may_be_compressed(tmp_path):
    mlp = write(tmp_path / "mlp.csv.xz", mlp_rows())
    attention = write(tmp_path / "attention.csv.xz", attention_rows())
    assert_same(fit_profiles(mlp, attention, layers=LAYERS).model, TRUTH, 1e-6)


def test_noisy_profiles(tmp_path):
    rng = np.random.default_rng(3)

    def noisy(rows):
        for row in rows:
            medians = [name for name in row if name.endswith(".median") and row[name] != ""]
            yield row | {name: row[name] * rng.normal(1.0, 0.05) for name in medians}

    mlp = write(tmp_path / "mlp.csv", noisy(mlp_rows()))
    attention = write(tmp_path / "attention.csv", noisy(attention_rows()))
    result = fit_profiles(mlp, attention, layers=LAYERS)
    assert result.model.base_ms == pytest.approx(TRUTH.base_ms, rel=0.1)
    assert result.model.per_context_ms == pytest.approx(TRUTH.per_context_ms, rel=0.1)
    assert result.model.per_prefill_ms == pytest.approx(TRUTH.per_prefill_ms, rel=0.1)
    assert max(error.mean for error in result.errors.values()) < 0.05


def test_rows_of_other_parallelism_and_block_size_are_ignored(tmp_path):
    slow = CostModel(base_ms=99.0, per_token_ms=1.0, per_context_ms=1.0, per_prefill_ms=1.0)
    two = {"num_tensor_parallel_workers": 2}
    mlp = write(tmp_path / "mlp.csv", [*mlp_rows(slow, **two), *mlp_rows()])
    attention = write(
        tmp_path / "attention.csv",
        [*attention_rows(slow, **two), *attention_rows(slow, block_size=32), *attention_rows()],
    )
    assert_same(fit_profiles(mlp, attention, layers=LAYERS).model, TRUTH, 1e-6)


def test_repeated_batch_sizes_are_averaged(tmp_path):
    def scaled(factor):
        for row in mlp_rows():
            yield {k: v * factor if k.startswith("time") else v for k, v in row.items()}

    mlp = write(tmp_path / "mlp.csv", [*scaled(0.8), *scaled(1.2)])
    attention = write(tmp_path / "attention.csv", attention_rows())
    assert_same(fit_profiles(mlp, attention, layers=LAYERS).model, TRUTH, 1e-6)


def test_missing_optional_operators_count_as_nothing(tmp_path):
    optional = ("input_layernorm", "post_attention_layernorm", "add")
    kept = ({k: v for k, v in r.items() if k.split(".")[1:2] != ["add"]} for r in mlp_rows())
    blank = (
        row | {f"time_stats.{name}.median": "" for name in optional if name != "add"}
        for row in kept
    )
    mlp = write(tmp_path / "mlp.csv", blank)
    attention = write(tmp_path / "attention.csv", attention_rows())
    model = fit_profiles(mlp, attention, layers=LAYERS).model
    assert model.base_ms == pytest.approx(0.8 * TRUTH.base_ms, rel=1e-6)


def test_cache_writes_are_counted_or_left_out(tmp_path):
    extra = 0.01 / LAYERS  # ms per token and layer

    def with_save():
        for row in attention_rows():
            tokens = max(row["batch_size"], row["prefill_chunk_size"])
            yield row | times("attn_kv_cache_save", extra * tokens)

    mlp = write(tmp_path / "mlp.csv", mlp_rows())
    attention = write(tmp_path / "attention.csv", with_save())
    counted = fit_profiles(mlp, attention, layers=LAYERS).model
    assert counted.per_token_ms == pytest.approx(TRUTH.per_token_ms + 0.01, rel=1e-6)
    left_out = fit_profiles(mlp, attention, layers=LAYERS, kv_cache_save=False).model
    assert left_out.per_token_ms == pytest.approx(TRUTH.per_token_ms, rel=1e-6)


def test_grouped_query_decodes_pay_the_overhead(tmp_path):
    grouped = {"n_kv_head": 8}
    mlp = write(tmp_path / "mlp.csv", mlp_rows(**grouped))
    attention = write(tmp_path / "attention.csv", attention_rows(overhead=0.1, **grouped))
    assert_same(fit_profiles(mlp, attention, layers=LAYERS).model, TRUTH, 1e-6)
    bare = fit_profiles(mlp, attention, layers=LAYERS, decode_overhead=0.0).model
    assert bare.per_context_ms == pytest.approx(TRUTH.per_context_ms / 1.1, rel=0.01)


def test_max_tokens_leaves_larger_batches_out(tmp_path):
    result = fit_profiles(*profiles(tmp_path), layers=LAYERS, max_tokens=512)
    assert "prefill_long" not in result.errors
    assert result.model.knots == ((128, pytest.approx(0.023, rel=1e-6)),)


def test_all_reduces_of_a_tensor_parallel_model(tmp_path):
    two = {"num_tensor_parallel_workers": 2}
    network = [
        {"num_workers": workers, "devices_per_node": near, "size": 2 * 4096 * tokens}
        | times("all_reduce", 0.03 + 1e-4 * tokens if workers == near == 2 else 77.0)
        for workers, near in ((2, 2), (2, 1), (4, 2))
        for tokens in (1, 128, 512, 1024, 4096)
    ]
    result = fit_profiles(
        *profiles(tmp_path, **two),
        layers=LAYERS,
        tensor_parallel=2,
        all_reduce_csv=write(tmp_path / "all_reduce.csv", network),
    )
    # two per layer, each with 0.02 ms to launch it
    assert result.model.base_ms == pytest.approx(TRUTH.base_ms + 32 * 2 * 0.05, rel=1e-6)
    assert result.model.per_token_ms == pytest.approx(0.042 + 32 * 2 * 1e-4, rel=1e-6)


def test_tensor_parallel_without_a_network_profile(tmp_path):
    with pytest.raises(TailraceError, match="needs all_reduce_csv"):
        fit_profiles(*profiles(tmp_path), layers=LAYERS, tensor_parallel=2)


def replace_cell(path, line, column, text):
    rows = list(csv.reader(path.read_text().splitlines()))
    rows[line - 1][rows[0].index(column)] = text
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows(rows)


@pytest.mark.parametrize("text", ["fast", "", "nan", "inf", "-0.1"])
def test_a_bad_cell_is_named_by_file_line_and_column(tmp_path, text):
    mlp, attention = profiles(tmp_path)
    column = "time_stats.mlp_up_proj.median"
    replace_cell(mlp, 17, column, text)
    with pytest.raises(TailraceError, match=rf"mlp\.csv, line 17, column {column}: .*'{text}'"):
        fit_profiles(mlp, attention, layers=LAYERS)


def test_an_empty_decode_time_is_an_error_in_a_decode_row_only(tmp_path):
    mlp, attention = profiles(tmp_path)
    last = len(attention.read_text().splitlines())
    replace_cell(attention, last, "time_stats.attn_decode.median", "")
    with pytest.raises(TailraceError, match=f"line {last}, column time_stats.attn_decode.median"):
        fit_profiles(mlp, attention, layers=LAYERS)


def test_missing_columns_are_all_named(tmp_path):
    gone = ("time_stats.attn_rope.median", "num_tokens")
    rows = ({k: v for k, v in row.items() if k not in gone} for row in mlp_rows())
    mlp = write(tmp_path / "mlp.csv", rows)
    attention = write(tmp_path / "attention.csv", attention_rows())
    with pytest.raises(
        TailraceError, match=r"mlp\.csv: missing columns num_tokens, time_stats.*rope"
    ):
        fit_profiles(mlp, attention, layers=LAYERS)


def test_a_row_of_the_wrong_length_is_named(tmp_path):
    mlp, attention = profiles(tmp_path)
    mlp.write_text(mlp.read_text() + "1,2,3\n")
    with pytest.raises(TailraceError, match=r"mlp\.csv, line \d+: 3 cells, expected \d+"):
        fit_profiles(mlp, attention, layers=LAYERS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*mlp.csv: No such file"),
        (b"", "has no rows"),
        (b"num_tokens,a\n", "has no rows"),
        (b"num_tokens\n\xff\xfe\n", "is not a CSV file"),
    ],
)
def test_unreadable_files(tmp_path, text, message):
    if text is not None:
        (tmp_path / "mlp.csv").write_bytes(text)
    with pytest.raises(TailraceError, match=message):
        fit_profiles(tmp_path / "mlp.csv", tmp_path / "attention.csv", layers=LAYERS)


def test_broken_compression(tmp_path):
    (tmp_path / "mlp.csv.xz").write_bytes(b"not xz")
    with pytest.raises(TailraceError, match=r"mlp\.csv\.xz is not a CSV file"):
        fit_profiles(tmp_path / "mlp.csv.xz", tmp_path / "attention.csv", layers=LAYERS)


def test_absent_parallelism_lists_what_there_is(tmp_path):
    files = profiles(tmp_path, num_tensor_parallel_workers=4)
    with pytest.raises(TailraceError, match="no rows with num_tensor_parallel_workers 1; it has 4"):
        fit_profiles(*files, layers=LAYERS)


def test_profiles_of_different_models_do_not_go_together(tmp_path):
    mlp = write(tmp_path / "mlp.csv", mlp_rows(n_embd=8192))
    attention = write(tmp_path / "attention.csv", attention_rows())
    with pytest.raises(TailraceError, match="different models"):
        fit_profiles(mlp, attention, layers=LAYERS)
    mixed = write(tmp_path / "mixed.csv", [*mlp_rows(), *mlp_rows(n_embd=8192)])
    with pytest.raises(TailraceError, match=r"mixed\.csv mixes models"):
        fit_profiles(mixed, attention, layers=LAYERS)


def test_no_batch_is_small_enough(tmp_path):
    mlp = write(tmp_path / "mlp.csv", mlp_rows())
    prefills = [row for row in attention_rows() if row["is_prefill"]]
    attention = write(tmp_path / "attention.csv", prefills)
    with pytest.raises(TailraceError, match="no batch of at most 16 tokens"):
        fit_profiles(mlp, attention, layers=LAYERS, max_tokens=16)
    only = fit_profiles(mlp, attention, layers=LAYERS)
    assert only.undetermined == ("per_context_ms",)
