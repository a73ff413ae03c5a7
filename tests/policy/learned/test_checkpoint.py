"""Policy files: the same policy comes back, and nothing else is accepted."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from policy.networks import VARIANTS, random_policy, random_tensors, small
from policy.views import random_view
from tailrace.errors import TailraceError
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.checkpoint import (
    description,
    load,
    read,
    save,
    save_with_order,
    schema,
)
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.policy.registry import get
from tailrace.view.ordering import Order

TRAINING = {"updates": 3, "preset": "quick"}
SCORES = {"suite": 0.71}


def saved(folder: Path, variant: str = "plain", name: str = "mine.tailrace") -> Path:
    policy = random_policy(variant)
    path = folder / name
    save(path, policy.config, policy.tensors, training=TRAINING, seeds=[4, 5], scores=SCORES)
    return path


def rewritten(path: Path, **changes: object) -> Path:
    """The file with another description, and a checksum that fits."""
    about, tensors = read(path)
    save_file(tensors, path, description(about | changes, tensors))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_policy_comes_back(tmp_path: Path, variant: str) -> None:
    policy, loaded = random_policy(variant), load(saved(tmp_path, variant))
    assert loaded.name == "mine"
    assert loaded.config == policy.config
    for seed in range(5):
        view = random_view(seed)
        np.testing.assert_array_equal(loaded.scores(view), policy.scores(view))


def test_the_description_comes_back(tmp_path: Path) -> None:
    about = load(saved(tmp_path)).about
    assert about["training"] == TRAINING
    assert about["seeds"] == [4, 5]
    assert about["scores"] == SCORES
    assert set(about["versions"]) == {"tailrace", "numpy", "python"}
    assert [name for name, _ in about["schema"]["replica"]] == [f.name for f in REPLICA_FEATURES]


def test_equal_policies_are_equal_files(tmp_path: Path) -> None:
    files = [saved(tmp_path, name=f"{k}.tailrace").read_bytes() for k in range(5)]
    assert len(set(files)) == 1


def test_a_name_on_the_command_line(tmp_path: Path) -> None:
    path = saved(tmp_path)
    policy = get(str(path))
    assert isinstance(policy, LearnedPolicy)
    with pytest.raises(TailraceError, match="is trained and takes no parameters"):
        get(str(path), weight=1.0)
    with pytest.raises(TailraceError, match=r"there is no policy file .*absent.tailrace"):
        get(str(tmp_path / "absent.tailrace"))


def test_an_order_of_its_own_is_kept_and_everything_else_stays(tmp_path: Path) -> None:
    path, order = saved(tmp_path), Order(w=7.5, most=12)
    before, plain = path.read_bytes(), load(path)
    assert plain.own_order is None
    assert "order" not in plain.about["network"]  # files without an order are as they were
    save_with_order(path, plain, order)
    ordered = load(path)
    assert ordered.own_order == ordered.copy().own_order == order
    assert ordered.order is None  # nobody asked for it
    assert ordered.about["training"] == TRAINING
    for seed in range(5):
        view = random_view(seed)
        np.testing.assert_array_equal(ordered.scores(view), plain.scores(view))
    assert get(f"{path}+order").order == order
    assert get(f"{path}+order:w=3").order == Order(w=3)
    save_with_order(path, ordered, None)
    assert path.read_bytes() == before


def test_an_impossible_order_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    about, _ = read(path)
    rewritten(path, network=about["network"] | {"order": {"w": -1.0}})
    with pytest.raises(TailraceError, match="w must be a number from 0"):
        load(path)


def test_the_shipped_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "tailrace.tailrace")
    with pytest.raises(TailraceError, match=r"comes without the trained policy.*`tailrace train`"):
        get("tailrace")
    saved(tmp_path, name="tailrace.tailrace")
    assert get("tailrace").name == "tailrace"


# ---- files that are refused


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    for length in [0, 1, 7, 8, 100, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(TailraceError, match=r"mine.tailrace is damaged or no policy file"):
            load(path)


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    places = np.random.default_rng(0).integers(0, len(data), 150)
    for place in [*places.tolist(), 0, 8, 9, len(data) - 1]:
        changed = bytearray(data)
        changed[place] ^= 0x10
        path.write_bytes(bytes(changed))
        with pytest.raises(TailraceError, match=r"mine\.tailrace"):
            load(path)
    path.write_bytes(data)
    load(path)


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.tailrace"
    path.write_text("a text of some length, but no policy")
    with pytest.raises(TailraceError, match="damaged or no policy file"):
        load(path)
    save_file({"x": np.zeros(3, np.float32)}, path)
    with pytest.raises(TailraceError, match="safetensors file, but not a Tailrace policy"):
        load(path)


def test_a_changed_weight_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tensors = load_file(path)
    metadata = description(read(path)[0], tensors)
    save_file(tensors, path, metadata)
    load(path)
    tensors["actor.norm.bias"][0] += 1
    save_file(tensors, path, metadata)
    with pytest.raises(TailraceError, match="was changed after it was written"):
        load(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sha256": "0"}'])
def test_a_description_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = saved(tmp_path)
    save_file(load_file(path), path, {"tailrace": text})
    with pytest.raises(TailraceError, match="was changed after it was written"):
        load(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match="has format 99, this version reads format 1"):
        load(rewritten(saved(tmp_path), format=99))


def changed_schema(part: str, k: int, feature: list[str]) -> dict[str, list[list[str]]]:
    out = schema()
    out[part][k] = feature
    return out


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (changed_schema("replica", 2, ["mood", "x"]), "replica feature 3 is 'mood' scaled x there"),
        (
            changed_schema("replica", 1, [REPLICA_FEATURES[1].name, "cbrt(x)"]),
            rf"replica feature 2 is '{REPLICA_FEATURES[1].name}' scaled cbrt\(x\) there",
        ),
        (
            changed_schema("request", 4, ["mood", "x"]),
            rf"request feature 5 is 'mood' scaled x there and '{REQUEST_FEATURES[4].name}'",
        ),
        (
            schema() | {"request": [*schema()["request"], ["more", "x"]]},
            rf"request feature {len(REQUEST_FEATURES) + 1} is 'more' scaled x there and missing",
        ),
    ],
)
def test_another_schema_is_refused_by_its_first_difference(
    tmp_path: Path, found: object, message: str
) -> None:
    with pytest.raises(TailraceError, match=message):
        load(rewritten(saved(tmp_path), schema=found))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_feature_that_was_added_since_is_ignored(tmp_path: Path, variant: str) -> None:
    """As if the file had been written before ``trend`` and ``turn`` were there."""
    path = saved(tmp_path, variant)
    about, tensors = read(path)
    names = [feature.name for feature in (*REPLICA_FEATURES, *REQUEST_FEATURES)]
    replica, request = names.index("trend"), names.index("turn")
    older, expected = dict(tensors), dict(tensors)
    in_request = request - len(REPLICA_FEATURES)
    for name, array in tensors.items():
        if name.endswith(".input.weight"):
            older[name] = np.delete(array, [replica, request], axis=1)
            expected[name] = array.copy()
            expected[name][:, [replica, request]] = 0
        elif name.startswith("replica_norm") and array.ndim:
            older[name] = np.delete(array, replica)
        elif name.startswith("request_norm") and array.ndim:
            older[name] = np.delete(array, in_request)
    features = {
        part: [f for f in found if f[0] not in ("trend", "turn")]
        for part, found in schema().items()
    }
    about["schema"] = features
    older = {name: np.array(array, order="C") for name, array in older.items()}
    save_file(older, path, description(about, older))
    loaded = load(path)
    assert {"trend", "turn"} <= set(loaded.config.ignore)
    assert loaded.about["schema"] == schema()
    blind = LearnedPolicy(random_policy(variant).config, expected)
    for seed in range(5):
        view = random_view(seed)
        np.testing.assert_allclose(loaded.scores(view), blind.scores(view), rtol=1e-5, atol=1e-6)


def test_a_network_that_does_not_fit_its_settings_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    network = read(path)[0]["network"]
    with pytest.raises(TailraceError, match=r"cannot use policy .* has shape .*, not"):
        load(rewritten(path, network=network | {"scorer_hidden": 6}))
    with pytest.raises(TailraceError, match="network setting 'wings': Extra inputs"):
        load(rewritten(saved(tmp_path), network=network | {"wings": 2}))


# ---- writing


def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    config = small()
    tensors = random_tensors(config)
    tensors["actor.hidden.bias"][0] = np.inf
    with pytest.raises(TailraceError, match=r"'actor.hidden.bias' .*not finite"):
        save(tmp_path / "x.tailrace", config, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_name_is_refused_at_once(tmp_path: Path) -> None:
    config = small()
    for name, message in (("x.pt", "must end in .tailrace"), ("no/x.tailrace", "no folder")):
        with pytest.raises(TailraceError, match=message):
            save(tmp_path / name, config, random_tensors(config))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()

    def full(self: Path, _data: bytes) -> int:
        with self.open("wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TailraceError, match=r"cannot write .*No space left on device"):
        save(path, small(), random_tensors(small(), seed=9))
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]
