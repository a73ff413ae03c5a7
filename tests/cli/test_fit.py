import csv
from pathlib import Path

import pytest

from tailrace import scenario as scenarios

OPERATORS = (
    "attn_pre_proj", "attn_rope", "attn_post_proj", "mlp_up_proj", "mlp_act", "mlp_down_proj",
)  # fmt: skip
COMMON = {"n_embd": 4096, "n_kv_head": 32, "num_tensor_parallel_workers": 1}


def write(name, rows):
    with Path(name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def profiles(run):
    """Two layers of 6 operators: base 12 ms, 0.012 ms per token; attention 1e-4 and 1e-5 ms."""
    mlp = [
        {**COMMON, "num_tokens": t, **{f"time_stats.{o}.median": 1 + 0.001 * t for o in OPERATORS}}
        for t in (1, 8, 64, 512, 1024, 4096)
    ]
    write("mlp.csv", mlp)
    attention = []
    for size in (1, 4, 32, 128, 512):
        for before in (16, 256, 2048):
            for prefill in (True, False):
                batch, chunk = (1, size) if prefill else (size, 0)
                ms = 1e-5 * chunk * (before + chunk / 2) if prefill else 1e-4 * batch * before
                row = {**COMMON, "n_q_head": 32, "block_size": 16, "batch_size": batch}
                row |= {"prefill_chunk_size": chunk, "kv_cache_size": before, "is_prefill": prefill}
                row["time_stats.attn_prefill.median"] = ms / 2 if prefill else 0.0
                row["time_stats.attn_decode.median"] = 0.0 if prefill else ms / 2
                attention.append(row)
    write("attention.csv", attention)
    return ("--mlp", "mlp.csv", "--attention", "attention.csv", "--layers", 2)


def test_fit_prints_errors_and_a_config_that_loads(run, run_json, profiles):
    found = run_json("fit", *profiles)["model"]
    assert found["base_ms"] == pytest.approx(12.0, rel=1e-3)
    assert found["per_token_ms"] == pytest.approx(0.012, rel=1e-3)
    assert found["per_context_ms"] == pytest.approx(1e-4, rel=1e-3)
    assert found["per_prefill_ms"] == pytest.approx(1e-5, rel=1e-3)
    text = run("fit", *profiles, "--out", "mine.toml").stdout
    assert "largest error" in text
    assert text.endswith(Path("mine.toml").read_text())
    cost = scenarios.load("mine.toml").cluster.replicas[0].cost
    assert cost is not None
    assert cost.knots == ()
    assert cost.base_ms == found["base_ms"]
    assert cost.per_prefill_ms == found["per_prefill_ms"]


def test_mistakes_name_their_place(refuse, profiles):
    text = Path("attention.csv").read_text().splitlines()
    text[3] = text[3].replace("4096", "many")
    Path("attention.csv").write_text("\n".join(text))
    message = refuse("fit", *profiles, "--out", "mine.toml")
    assert "attention.csv, line 4, column n_embd" in message
    assert "must end in .toml" in refuse("fit", *profiles, "--out", "mine.json")
