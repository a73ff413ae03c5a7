"""Writes the tables of settings on their pages anew: python docs/settings_table.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tailrace.config import Settings
from tailrace.learn.settings import TrainSettings
from tailrace.router.serve_settings import ServeSettings

DOCS = Path(__file__).parent
GUIDES: dict[str, type[BaseModel]] = {
    "training-settings.md": TrainSettings,
    "router-settings.md": ServeSettings,
}
BEGIN, END = "<!-- settings: python docs/settings_table.py -->\n", "<!-- end of settings -->\n"


def tables(model: type[BaseModel]) -> str:
    """Return one table for a model itself and one for each group of its settings."""
    return "\n".join(_table(path, part) for path, part in _groups("", model))


def with_tables(guide: str, model: type[BaseModel]) -> str:
    """Return the text of a guide with its tables brought up to date."""
    before, rest = guide.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables(model)}\n{END}{after}"


def _groups(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        if inner is not None:
            yield from _groups(f"{path}.{name}".strip("."), inner)


def _inner(annotation: Any) -> type[Settings] | None:
    """The settings an annotation is made of, if it is."""
    for part in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(part, type) and issubclass(part, Settings):
            return part
    return None


def _table(path: str, model: type[BaseModel]) -> str:
    about = " ".join((model.__doc__ or "").split())
    lines = [
        f"## `{path or 'top level'}`",
        "",
        about,
        "",
        "| setting | default | |",
        "|---|---|---|",
    ]
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        text = " ".join((field.description or "").split()) or "see below"
        lines.append(f"| `{name}` | {'' if inner else _default(field)} | {text} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}, ""):
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(weight)}" for key, weight in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    for name, model in GUIDES.items():
        guide = DOCS / name
        text = with_tables(guide.read_text(encoding="utf-8"), model)
        guide.write_text(text, encoding="utf-8")
