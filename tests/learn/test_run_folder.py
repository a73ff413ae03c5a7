import errno
import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file, save_file  # noqa: E402

from learn.tiny import StopAfter, Stopped, log, settings, train  # noqa: E402
from tailrace.errors import TailraceError  # noqa: E402
from tailrace.learn.improve.ppo_settings import PpoSettings  # noqa: E402
from tailrace.learn.run_folder import COLUMNS, RunFolder  # noqa: E402
from tailrace.learn.settings import BranchingSettings  # noqa: E402
from tailrace.learn.trainer import Trainer  # noqa: E402
from tailrace.learn.worlds import FIGURE_NAMES  # noqa: E402
from tailrace.policy.learned import checkpoint  # noqa: E402

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after its first update."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stopped):
        train(folder, watcher=StopAfter(3))
    return folder / "run"


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of it to do harm to."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def resume(run):
    return Trainer(run, None, 1).run()


def usable(run):
    """All policy files of a run can be loaded."""
    paths = [*run.glob("*.tailrace"), *(run / "checkpoints").iterdir()]
    return len([checkpoint.load(path) for path in paths])


# ---- beginning ----------------------------------------------------------------------------------


def test_a_run_is_not_begun_in_a_folder_that_holds_something(run, tmp_path):
    with pytest.raises(TailraceError, match=r"holds a training run already.*--resume.*-o"):
        Trainer(run, settings(tmp_path), 1)
    assert usable(run) == 5
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("please keep")
    with pytest.raises(TailraceError, match="not an empty folder"):
        Trainer(other, settings(tmp_path), 1)
    with pytest.raises(TailraceError, match="not an empty folder"):
        Trainer(other / "thesis.tex", settings(tmp_path), 1)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_the_folder_is_looked_at_before_anything_is_measured(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tailrace.learn.trainer.WorldSchedule", lambda *_: pytest.fail("too late"))
    with pytest.raises(TailraceError, match="holds a training run"):
        Trainer(run, settings(tmp_path), 1)


def test_a_mistake_in_the_settings_leaves_no_folder(tmp_path):
    with pytest.raises(TailraceError, match="unknown scenario"):
        Trainer(tmp_path / "run", settings(tmp_path, {"scenarios": ["nowhere"]}), 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(TailraceError, match="cannot make"):
        Trainer(tmp_path / "run", settings(tmp_path), 1)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TailraceError, match=r"cannot make .*Not a directory"):
        RunFolder(tmp_path / "file" / "run").create(settings(tmp_path))


# ---- damage -------------------------------------------------------------------------------------


def test_no_run_at_all(tmp_path):
    with pytest.raises(TailraceError, match="is no training run"):
        Trainer(tmp_path, None, 1)


def test_a_run_without_state(run):
    (run / "state.safetensors").unlink()
    with pytest.raises(TailraceError, match=r"state\.safetensors is missing.*cannot be resumed"):
        resume(run)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not at all"),
        lambda path: save_file(load_file(path), path),
        _flip,
    ],
    ids=["truncated", "empty", "other", "stripped", "flipped"],
)
def test_a_damaged_state(run, harm):
    harm(run / "state.safetensors")
    with pytest.raises(TailraceError, match=r"is damaged.*checkpoints beside it are usable"):
        resume(run)
    assert usable(run) == 5


def test_a_state_of_another_version(run):
    folder = RunFolder(run)
    arrays, numbers = folder.load_state(folder.settings())
    folder.save_state(arrays, {**numbers, "momentum": 3}, folder.settings())
    with pytest.raises(TailraceError, match="saved by another version"):
        resume(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates": 7}, "changed after the run began, and a run goes on as it was begun"),
        ({"network": {"hidden": 16}}, "changed after the run began"),
        ({"momentum": 1}, r"changed, or written by another version.*unknown setting 'momentum'"),
        ({"scenarios": 3}, "changed, or written by another version"),
    ],
)
def test_changed_settings(run, change, message):
    path = run / "settings.json"
    data = json.loads(path.read_text())
    for key, value in change.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(data))
    with pytest.raises(TailraceError, match=message):
        resume(run)


def test_settings_of_an_older_version_load_without_a_warning(run):
    path = run / "settings.json"
    data = json.loads(path.read_text())
    before = RunFolder(run).settings()
    for section, model in (("ppo", PpoSettings), ("branching", BranchingSettings)):
        for old, new in model.RENAMED.items():
            data[section][old] = data[section].pop(new)
    path.write_text(json.dumps(data))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RunFolder(run).settings() == before
        RunFolder(run).load_state(before)


def test_a_changed_scenario(tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path, watcher=StopAfter(1))
    (path,) = tmp_path.glob("*.toml")
    text = path.read_text()
    path.write_text(text.replace("rate = 14.0", "rate = 15.0"))
    with pytest.raises(TailraceError, match=r"scenario .*14\.toml has changed since the run began"):
        resume(tmp_path / "run")
    path.write_text(text + "# a comment changes nothing\n")
    resume(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_unreadable_settings(run, text):
    (run / "settings.json").write_text(text)
    with pytest.raises(TailraceError, match=r"settings\.json"):
        resume(run)


def test_a_damaged_checkpoint_that_demonstrations_are_made_with(tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path, {"branching": {"imitation_weight": 1.0}}, watcher=StopAfter(3))
    _flip(tmp_path / "run" / "checkpoints" / "000000.tailrace")
    with pytest.raises(TailraceError, match=r"000000\.tailrace was changed"):
        resume(tmp_path / "run")


def test_a_damaged_log(run):
    (run / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TailraceError, match=r"cannot go on with .*log\.csv.*move it away"):
        resume(run)
    (run / "log.csv").unlink()
    resume(run)
    assert [row["step"] for row in log(run)] == ["3"]


# ---- a full disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state.safetensors", "last.tailrace", "000003.tailrace", "best"])
def test_a_full_disk_leaves_the_last_good_files(run, name, monkeypatch):
    before = {path: path.read_bytes() for path in run.rglob("*.tailrace")}
    before[run / "state.safetensors"] = (run / "state.safetensors").read_bytes()
    real = Path.write_bytes

    def write_bytes(path, data):
        if name in path.name:
            real(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_bytes)
        trainer = Trainer(run, None, 1)
        trainer.state.best_score = None  # the next one is the best, and has to be written
        with pytest.raises(TailraceError, match=r"cannot write .*: No space left on device"):
            trainer.run()
    assert not list(run.rglob("*.tmp"))
    assert usable(run) >= 5
    if "state" in name:
        assert (run / "state.safetensors").read_bytes() == before[run / "state.safetensors"]
    resume(run)
    assert [row["step"] for row in log(run)] == ["0", "1", "2", "3"]
    assert usable(run) == 6


@pytest.mark.parametrize("where", ["csv", "board"])
def test_a_full_disk_when_logging(run, where, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if where == "csv":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
        with pytest.raises(TailraceError, match=r"cannot write the logs.*No space.*--resume"):
            resume(run)
    resume(run)
    assert [row["step"] for row in log(run)] == ["0", "1", "2", "3"]


# ---- what is logged -----------------------------------------------------------------------------


def test_state_comes_back_as_it_was(tmp_path):
    folder = RunFolder(tmp_path)
    given = settings(tmp_path)
    arrays = {"b": np.float32(3.5), "a": np.arange(6).reshape(2, 3).T, "c": np.zeros((0, 2))}
    folder.save_state({k: np.asarray(v) for k, v in arrays.items()}, {"x": 0.1}, given)
    found, numbers = folder.load_state(given)
    assert numbers == {"x": 0.1}
    assert {name: array.shape for name, array in found.items()} == {
        "a": (3, 2), "b": (), "c": (0, 2),
    }  # fmt: skip
    assert (found["a"] == arrays["a"]).all()


def test_the_table_of_a_run(stopped):
    rows = log(stopped)
    assert tuple(rows[0]) == COLUMNS
    assert [(row["step"], row["phase"]) for row in rows] == [
        ("0", "clone"), ("1", "clone"), ("2", "branching"),
    ]  # fmt: skip
    for row in rows:
        for name in ("seconds", "samples", "steps_per_s", "loss", "score", "score_vs_best_rule",
                     "ttft_p99_s", "e2e_mean_s", "largest_share"):  # fmt: skip
            assert np.isfinite(float(row[name])), name
        assert float(row["score"]) > 0
        assert 1 / 3 <= float(row["largest_share"]) <= 1
    assert rows[0]["kl"] == ""
    assert float(rows[2]["entropy"]) > 0


def _board(run, rule=""):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard" / rule))
    board.Reload()
    return board


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_everything_is_in_tensorboard(tmp_path):
    stages = [{"name": "a", "updates": 1}, {"name": "b"}]
    train(
        tmp_path,
        {
            "advantage": "gae",
            "objective": "clipped",
            "curriculum": stages,
            "ppo": {"start_kl_weight": 0.1},
        },
    )
    board = _board(tmp_path / "run")
    tags = set(board.Tags()["scalars"])
    wanted = {
        *(f"ppo/{name}" for name in (
            "loss", "policy_loss", "value_loss", "entropy", "entropy_fraction", "kl", "kl_to_start",
            "clip_fraction", "explained_variance", "grad_norm", "learning_rate", "temperature",
            "pulse", "epsilon", "entropy_weight", "raw_reward", "raw_reward_deviation",
            "raw_reward_p01", "share_at_lower_bound", "share_at_upper_bound", "score",
            "score_vs_best_rule", "ttft_p99_s", "e2e_mean_s",
            "largest_share", "red_flag", "steps_per_s",
        )),
        "terms/e2e_s", "terms/ttft_s", "terms/late_s", "features/in_flight_mean",
        "features/in_flight_deviation", "curriculum/stage", "clone/imitation_loss",
    }  # fmt: skip
    wanted |= {f"evaluation/{name}" for name in ("score", *FIGURE_NAMES)}
    wanted |= {f"share/sessions-hot-14/replica_{k}" for k in range(3)}
    assert wanted <= tags
    assert [event.value for event in board.Scalars("curriculum/stage")] == [0, 0, 0, 1]
    assert [event.step for event in board.Scalars("ppo/kl")] == [2, 3]
    logged = [float(row["kl"]) for row in log(tmp_path / "run")[2:]]
    assert [event.value for event in board.Scalars("ppo/kl")] == pytest.approx(logged, rel=1e-5)
    shares = board.Histograms("ppo/replica_share")[-1].histogram_value
    assert shares.num == 3
    assert shares.sum == pytest.approx(3)
    _check_reference_curves(tmp_path / "run", board)


def _check_reference_curves(run, board):
    """Baselines have the same tags and steps as the policy, and the figures of baselines.json."""
    baselines = json.loads((run / "baselines.json").read_text())
    assert set(baselines) == {"least_outstanding", "round_robin"}
    for rule, figures in baselines.items():
        curves = _board(run, rule)
        for name in ("score", *FIGURE_NAMES):
            tag = f"evaluation/{name}"
            found, ours = curves.Scalars(tag), board.Scalars(tag)
            assert [event.step for event in found] == [event.step for event in ours]
            assert [event.value for event in found] == pytest.approx([figures[name]] * len(ours))
    assert not (run / "tensorboard" / "random").exists()  # not a baseline of this run
    for row in log(run):
        for name in FIGURE_NAMES:
            assert float(row[name]) > 0, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_branching_is_in_tensorboard_and_a_resumed_run_has_no_step_twice(run):
    resume(run)
    board = _board(run)
    tags = set(board.Tags()["scalars"])
    assert {
        "branching/eta", "branching/gain", "branching/kl", "branching/entropy",
        "branching/learning_rate", "features/in_flight_mean",
    } <= tags  # fmt: skip
    assert [event.step for event in board.Scalars("branching/kl")] == [2, 3]


def test_policies_say_what_they_come_from(stopped):
    about = checkpoint.load(stopped / "best.tailrace").about
    assert about["training"]["settings"]["name"] == "tiny"
    assert about["seeds"] == [0]
    assert set(about["scores"]) >= {"score", "best_rule", "best_rule_score", "costs_s"}
    steps = sorted(path.stem for path in (stopped / "checkpoints").iterdir())
    assert steps == ["000000", "000001", "000002"]
