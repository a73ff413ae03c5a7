"""The folder of a training run: settings, state, checkpoints, and logs.

settings.json          what was asked for
state.safetensors      all that is needed to go on exactly where the run stopped
checkpoints/N.tailrace the policy after step N
best.tailrace          the best one by the evaluations
baselines.json         figures of the rules on the traffic of the evaluations
last.tailrace          the latest one
log.csv, tensorboard/  figures of every step
health.json            verdict at the end
"""

import csv
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialise

from tailrace import config
from tailrace.env.reward import RAW_QUANTILES
from tailrace.errors import RenamedSettingWarning, TailraceError
from tailrace.files import atomic_path
from tailrace.learn.settings import TrainSettings
from tailrace.learn.worlds import FIGURE_NAMES
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.network import Network

Arrays = dict[str, NDArray[Any]]
_STATE, _SETTINGS, _DIGEST = "state", "settings", "sha256"
#: Rules whose figures are drawn beside the policy's in TensorBoard, if they are baselines.
REFERENCE_RULES = ("random", "round_robin", "least_outstanding")
#: Columns of log.csv; TensorBoard has these and everything else.
COLUMNS = (
    "step", "phase", "stage", "seconds", "samples", "steps_per_s", "loss", "policy_loss",
    "value_loss", "imitation_loss", "entropy", "entropy_fraction", "kl", "kl_to_start", "eta",
    "gain", "clip_fraction", "explained_variance", "grad_norm", "learning_rate", "temperature",
    "epsilon", "entropy_weight", "pulse", "raw_reward", "raw_reward_deviation",
    *(f"raw_reward_{name}" for name in RAW_QUANTILES), "share_at_lower_bound",
    "share_at_upper_bound", "score",
    "score_vs_best_rule", *FIGURE_NAMES, "largest_share", "best", "red_flag", "rolled_back",
    "alarms",
)  # fmt: skip


class RunFolder:
    """Reads and writes the files of a run."""

    def __init__(self, path: Path) -> None:
        """Name a folder; nothing is touched."""
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best, self.last = path / "best.tailrace", path / "last.tailrace"
        self._settings, self._state = path / "settings.json", path / "state.safetensors"
        self._log = path / "log.csv"
        self._board: Any = None
        self._rule_boards: dict[str, Any] = {}

    def check_free(self) -> None:
        """Refuse a folder in which no run can be begun."""
        if self._settings.exists():
            raise TailraceError(
                f"{self.path} holds a training run already; go on with it by --resume, or choose "
                "another folder with -o"
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise TailraceError(f"{self.path} exists and is not an empty folder; choose another")

    def create(self, settings: TrainSettings) -> None:
        """Begin a run in a new or empty folder."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # First: an interrupted command leaves an empty folder or a run that can be resumed.
            self.write_json("settings.json", settings.model_dump(mode="json"))
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise TailraceError(f"cannot make {self.path}: {error.strerror or error}") from None

    def settings(self) -> TrainSettings:
        """Return what the run was asked for."""
        if not self._settings.is_file():
            raise TailraceError(f"{self.path} is no training run: it has no settings.json")
        try:
            data = json.loads(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TailraceError(f"cannot read {self._settings}: {error}") from None
        try:
            return _parse_settings(data)
        except TailraceError as error:
            raise TailraceError(
                f"{self._settings} was changed, or written by another version of Tailrace: {error}"
            ) from None

    def write_json(self, name: str, value: Any) -> None:
        """Write a file of the folder whole or not at all."""
        with atomic_path(self.path / name) as temporary:
            temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    # ---- state ----------------------------------------------------------------------------------

    @property
    def has_settings(self) -> bool:
        """Whether a run was begun here, so that it can be resumed."""
        return self._settings.is_file()

    @property
    def has_steps(self) -> bool:
        """Whether a step was done; a run that was stopped before is resumed from its settings.

        The state is written last, so the first step's checkpoint may be there without it.
        """
        others = (path for path in self.checkpoints.glob("*") if path != self.checkpoint_of(0))
        return self._state.is_file() or any(others)

    def save_state(
        self, arrays: Arrays, numbers: Mapping[str, Any], settings: TrainSettings
    ) -> None:
        """Replace the state; on a full disk the old one stays."""
        kept = {name: np.asarray(array, order="C") for name, array in sorted(arrays.items())}
        about = {
            _STATE: json.dumps(numbers, sort_keys=True, allow_nan=False),
            _SETTINGS: json.dumps(settings.model_dump(mode="json"), sort_keys=True),
        }
        about[_DIGEST] = _digest(kept, about)
        data = serialise(kept, about)
        with atomic_path(self._state) as temporary:
            temporary.write_bytes(data)

    def load_state(self, settings: TrainSettings) -> tuple[Arrays, dict[str, Any]]:
        """Return the state a run of these settings was left in."""
        if not self._state.is_file():
            raise TailraceError(
                f"{self._state} is missing; the checkpoints beside it are usable, but the run "
                "cannot be resumed"
            )
        try:
            with safe_open(self._state, "np") as file:
                about = file.metadata() or {}
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if about.pop(_DIGEST) != _digest(arrays, about):
                raise ValueError("its checksum does not match")
            numbers, begun_with = json.loads(about[_STATE]), json.loads(about[_SETTINGS])
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise TailraceError(
                f"{self._state} is damaged ({error}); the checkpoints beside it are usable, but "
                "the run cannot be resumed"
            ) from None
        # As settings, not as text: this version may have more of them, with defaults.
        if _parse_settings(begun_with) != settings:
            raise TailraceError(
                f"{self._settings} was changed after the run began, and a run goes on as it was "
                "begun: put it back, or begin a new run"
            )
        return arrays, numbers

    # ---- checkpoints ----------------------------------------------------------------------------

    def save_policy(
        self,
        path: Path,
        network: Network,
        settings: TrainSettings,
        step: int,
        scores: Mapping[str, Any],
    ) -> None:
        """Write a policy file."""
        training = {"step": step, "settings": settings.model_dump(mode="json")}
        checkpoint.save(
            path,
            network.config,
            network.tensors(),
            training=training,
            seeds=[settings.seed],
            scores=scores,
        )

    def checkpoint_of(self, step: int) -> Path:
        """Return the file of the policy after a step."""
        return self.checkpoints / f"{step:06d}{checkpoint.SUFFIX}"

    # ---- logs -----------------------------------------------------------------------------------

    def open_logs(self, step: int) -> list[dict[str, float]]:
        """Go on logging after ``step`` steps; what was logged after that is forgotten.

        Returns the numbers logged for the updates before.
        """
        from torch.utils.tensorboard import SummaryWriter

        rows = self._logged(step) if step and self._log.is_file() else []
        with (
            atomic_path(self._log) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        try:
            self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=step or None)
        except OSError as error:
            raise self._cannot_log(error) from None
        return [_numbers(row) for row in rows if row["phase"] != "clone"]

    def _logged(self, step: int) -> list[dict[str, str]]:
        try:
            with self._log.open(newline="", encoding="utf-8") as file:
                return [row for row in csv.DictReader(file) if int(row["step"]) < step]
        except (OSError, ValueError, KeyError, csv.Error) as error:
            raise TailraceError(
                f"cannot go on with {self._log} ({error}); move it away to begin a new one"
            ) from None

    def _cannot_log(self, error: OSError) -> TailraceError:
        return TailraceError(
            f"cannot write the logs of {self.path}: {error.strerror or error}; the last state is "
            "saved: make room and go on with --resume"
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the figures of a step to the table and to TensorBoard."""
        row = {"step": step, **metrics}
        try:
            with self._log.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS, extrasaction="ignore").writerow(row)
                file.flush()
                os.fsync(file.fileno())
            self._log_to_board(step, metrics)
        except OSError as error:
            raise self._cannot_log(error) from None

    def _log_to_board(self, step: int, metrics: Mapping[str, Any]) -> None:
        phase = metrics.get("phase", "train")
        for name, value in metrics.items():
            if isinstance(value, int | float):
                tag = name if "/" in name else f"{phase}/{name}"
                self._board.add_scalar(tag, value, step)
            elif isinstance(value, np.ndarray):
                self._board.add_histogram(f"{phase}/{name}", value, step)
        self._board.flush()

    def log_rules(self, step: int, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Write the figures of rules to TensorBoard as separate runs beside the policy's."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            for rule in REFERENCE_RULES:
                if rule not in figures:
                    continue
                if rule not in self._rule_boards:
                    self._rule_boards[rule] = SummaryWriter(
                        str(self.path / "tensorboard" / rule), purge_step=step or None
                    )
                for name, value in figures[rule].items():
                    self._rule_boards[rule].add_scalar(f"evaluation/{name}", value, step)
                self._rule_boards[rule].flush()
        except OSError as error:
            raise self._cannot_log(error) from None

    def close(self) -> None:
        """Close the logs."""
        for board in (self._board, *self._rule_boards.values()):
            if board is not None:
                board.close()


def _parse_settings(data: dict[str, Any]) -> TrainSettings:
    """Validate settings that Tailrace wrote; former names in them are no fault of the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedSettingWarning)
        return config.parse(TrainSettings, data)


def _digest(arrays: Arrays, about: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(about):
        digest.update(f"{name} {about[name]}".encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    """The entries of a row of the log that are numbers."""
    words = ("step", "phase", "stage")
    return {name: float(text) for name, text in row.items() if text and name not in words}
