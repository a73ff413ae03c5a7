"""A trained policy as one file ``NAME.tailrace``: safetensors with a JSON description, no pickle.

The description lists the features the network was trained on, in order. Features that were added
since are ignored by such a policy; a file for other features is refused, and so is a modified one
(it contains its SHA-256).
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialise

from tailrace.errors import TailraceError
from tailrace.files import atomic_path, check_target
from tailrace.policy.learned.architecture import SKETCH, NetworkConfig, Tensors
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES, Feature
from tailrace.policy.learned.policy import LearnedPolicy, check_tensors
from tailrace.view.ordering import Order

SUFFIX = ".tailrace"
FORMAT = 1
#: The policy that comes with the package.
SHIPPED = Path(__file__).parents[2] / "policies" / f"tailrace{SUFFIX}"
_ABOUT, _DIGEST = "tailrace", "sha256"


def schema() -> dict[str, list[list[str]]]:
    """Return name and scaling of every feature a policy of this version sees, in order."""
    return {"replica": _schema(REPLICA_FEATURES), "request": _schema(REQUEST_FEATURES)}


def _schema(features: Sequence[Feature]) -> list[list[str]]:
    return [[feature.name, feature.scaling] for feature in features]


def save(
    path: Path,
    config: NetworkConfig,
    tensors: Tensors,
    *,
    training: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (),
    scores: Mapping[str, Any] | None = None,
) -> None:
    """Write a policy file atomically.

    ``training`` (settings), ``seeds`` and ``scores`` are information for readers, as JSON. Equal
    arguments give equal bytes on equal versions.
    """
    path = Path(path)
    check_target(path, (SUFFIX,))
    check_tensors(config, tensors, len(REPLICA_FEATURES), len(REQUEST_FEATURES))
    about = {
        "format": FORMAT,
        "schema": schema(),
        "network": _network(config),
        "training": dict(training or {}),
        "seeds": list(seeds),
        "scores": dict(scores or {}),
        "versions": {name: version(name) for name in ("tailrace", "numpy")}
        | {"python": platform.python_version()},
    }
    arrays = {name: np.array(tensors[name], np.float32, order="C") for name in sorted(tensors)}
    data = serialise(arrays, description(about, arrays))
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def save_with_order(path: Path, policy: LearnedPolicy, order: Order | None) -> None:
    """Write a policy to a file, with an order of its own or, None, without one."""
    config = policy.config.model_copy(update={"order": order})
    notes = {name: policy.about[name] for name in ("training", "seeds", "scores")}
    save(path, config, policy.tensors, **notes)


def _network(config: NetworkConfig) -> dict[str, Any]:
    """Return the settings of a network as JSON; those without an order as before there was one."""
    return config.model_dump(mode="json", exclude=None if config.order else {"order"})


def description(about: Mapping[str, Any], tensors: Tensors) -> dict[str, str]:
    """Return the metadata of a file: one entry, as safetensors orders several at random."""
    return {_ABOUT: _text({**about, _DIGEST: _digest(about, tensors)})}


def _text(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)


def _digest(about: Mapping[str, Any], tensors: Tensors) -> str:
    digest = hashlib.sha256(_text(about).encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def load(path: Path, name: str | None = None) -> LearnedPolicy:
    """Return the policy of a file, named after it unless another name is given."""
    path = Path(path)
    about, tensors = read(path)
    config = _config(path, about)
    try:
        return LearnedPolicy(config, tensors, name or path.stem, about)
    except TailraceError as error:
        raise TailraceError(f"cannot use policy {path}: {error}") from None


def read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return the description and the tensors of a file, checked for damage.

    Both are those of a policy that ignores the features which were added since.
    """
    path = Path(path)
    if not path.is_file():
        raise TailraceError(f"there is no policy file {path}")
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise TailraceError(
            f"{path} is damaged or no policy file: {error}; train it again or restore a copy"
        ) from None
    text = metadata.get(_ABOUT)
    if text is None:
        raise TailraceError(f"{path} is a safetensors file, but not a Tailrace policy")
    try:
        about = json.loads(text)
        intact = about.pop(_DIGEST) == _digest(about, tensors)
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise TailraceError(
            f"{path} was changed after it was written (its checksum does not match); "
            "train it again or restore a copy"
        )
    if about["format"] != FORMAT:
        raise TailraceError(
            f"{path} has format {about['format']}, this version reads format {FORMAT}; "
            "use the version of Tailrace that wrote it, or train again"
        )
    return _with_new_features(path, about, tensors)


def _config(path: Path, about: Mapping[str, Any]) -> NetworkConfig:
    try:
        return NetworkConfig.model_validate(about["network"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TailraceError(
            f"cannot use policy {path}: its network setting '{where}': {first['msg']}"
        ) from None


def _with_new_features(
    path: Path, about: dict[str, Any], tensors: dict[str, NDArray[np.float32]]
) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Give features that are newer than the file the weight 0, and add them to ``ignore``.

    The description lists them as ``newer``.
    """
    _check_schema(path, about["schema"])
    known = {
        part: np.array([feature in about["schema"][part] for feature in features])
        for part, features in schema().items()
    }
    both = np.concatenate([known["replica"], known["request"]])
    if both.all():
        return about, tensors

    def widen(name: str, known: NDArray[np.bool_], fill: float) -> None:
        old = tensors.get(name)
        if old is not None and old.shape[-1:] == (known.sum(),):
            new = np.full((*old.shape[:-1], known.size), fill, old.dtype)
            new[..., known] = old
            tensors[name] = new

    for part, columns in known.items():
        widen(f"{part}_norm.mean", columns, 0.0)
        widen(f"{part}_norm.var", columns, 1.0)
    for trunk in ("actor", "critic"):
        widen(f"{trunk}.input.weight", both, 0.0)
    widen(SKETCH, known["replica"], 0.0)
    names = [name for features in schema().values() for name, _ in features]
    new = [name for name, is_known in zip(names, both, strict=True) if not is_known]
    network = about["network"] | {"ignore": [*about["network"].get("ignore", ()), *new]}
    return about | {"schema": schema(), "network": network, "newer": new}, tensors


def _check_schema(path: Path, found: Mapping[str, list[list[str]]]) -> None:
    """Raise unless the features of a file are all known, in the same order."""
    for part, features in schema().items():
        theirs = found[part]
        if theirs == [feature for feature in features if feature in theirs]:
            continue
        for k in range(max(len(features), len(theirs))):
            mine = features[k] if k < len(features) else None
            other = theirs[k] if k < len(theirs) else None
            if mine != other:
                raise TailraceError(
                    f"policy {path} was trained on other observations: {part} feature {k + 1} is "
                    f"{_shown(other)} there and {_shown(mine)} here; train it again with this "
                    "version"
                )


def _shown(feature: list[str] | None) -> str:
    return "missing" if feature is None else f"'{feature[0]}' scaled {feature[1]}"


def shipped() -> LearnedPolicy:
    """Return the policy that comes with the package."""
    if not SHIPPED.is_file():
        raise TailraceError(
            "this installation comes without the trained policy 'tailrace'; make one with "
            "`tailrace train` and name its file"
        )
    return load(SHIPPED)
