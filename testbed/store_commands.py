"""`testbed store`: what a store holds, whether it is whole, what of it can go, and carrying it elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.errors import UserError
from testbed.store import Store, default_root

if TYPE_CHECKING:
    from testbed.collect import Item
    from testbed.schema import Spec

store = typer.Typer(no_args_is_help=True, help="List, check, clean and carry the results of a store.")

StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Folder of results (default: $TESTBED_STORE, or ./runs).")
]
KeysArgument = Annotated[list[str], typer.Argument(metavar="[KEY]...", help="Starts of keys (default: everything).")]
SpecOption = Annotated[list[str], typer.Option("--spec", metavar="SPEC", help="Everything of a spec.")]


class Shape(StrEnum):
    table = "table"
    json = "json"


FormatOption = Annotated[Shape, typer.Option("--format", help="How to print it.")]


@store.command("list")
def list_(format: FormatOption = Shape.table, root: StoreOption = None) -> None:
    """Every artifact, and what is running, failed or was stopped halfway."""
    here = Store(root or default_root())
    rows = [_row(here, shelf, key) for shelf, key in here.known()]
    if format is Shape.json:
        _json(rows)
        return
    from rich.table import Table

    from testbed.show import console

    table = Table("shelf", "key", "kind", "name", "state", "size", "made")
    table.columns[5].justify = "right"
    for row in rows:
        table.add_row(
            row["shelf"],
            _short(row["key"]),
            row["kind"],
            row["name"],
            row["state"],
            _bytes(row["bytes"]) if row["bytes"] is not None else "",
            row["made"],
        )
    console().print(table)


@store.command("show")
def show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The start of a key, or <shelf>/<start>.")],
    format: FormatOption = Shape.table,
    root: StoreOption = None,
) -> None:
    """What is known of one artifact: its manifest, or why it failed."""
    here = Store(root or default_root())
    shelf, whole = _one(here, key)
    shown: dict[str, Any] = {"path": str(here.path(shelf, whole)), "state": _state(here, shelf, whole)}
    if here.path(shelf, whole).exists():
        problem, manifest = here.examine(shelf, whole, read=False)
        if problem is not None:
            raise UserError(
                f"The artifact {here.path(shelf, whole)} {problem}. The next run that needs it makes it anew."
            )
        shown |= manifest
    elif (failure := here.failure(shelf, whole)) is not None:
        shown |= vars(failure)
    if format is Shape.json:
        _json(shown)
        return
    for name, value in shown.items():
        if name == "files":
            for file, entry in value.items():
                typer.echo(f"file        {file}  {_bytes(entry['bytes'])}")
        elif isinstance(value, dict):
            for inner, item in value.items():
                typer.echo(f"{name:<11} {inner}: {_text(item)}")
        else:
            typer.echo(f"{name:<11} {_text(value)}")


@store.command("verify")
def verify(keys: KeysArgument = [], root: StoreOption = None) -> None:  # noqa: B006 (typer copies it)
    """Read every byte of every artifact and compare it with its digest. Touches nothing; status 1 for damage."""
    here = Store(root or default_root())
    wanted = _artifacts(here, keys)
    damaged = 0
    for shelf, key in wanted:
        if (problem := here.examine(shelf, key)[0]) is not None:
            typer.echo(f"{shelf}/{key} {problem}")
            damaged += 1
    if damaged:
        typer.echo(f"{damaged} of {_count(wanted)} cannot be used; the next run that needs them makes them anew.")
        raise typer.Exit(1)
    typer.echo(f"{_count(wanted)}, all whole.")


@store.command("gc")
def gc(
    spec: SpecOption = [],  # noqa: B006
    forget: Annotated[
        list[str],
        typer.Option("--forget", metavar="NAME", help="A spec whose results may go; its name, or with digits."),
    ] = [],  # noqa: B006
    yes: Annotated[bool, typer.Option("--yes", help="Delete; otherwise it is only said what would go.")] = False,
    root: StoreOption = None,
) -> None:
    """Delete what no spec needs that was run here, and what broken and stopped runs left."""
    from testbed import collect

    here = Store(root or default_root())
    remembered = here.remembered()
    forgotten = [one for one in remembered if one.id in forget or one.name in forget]
    if unknown := set(forget) - {name for one in forgotten for name in (one.id, one.name)}:
        known = ", ".join(one.id for one in remembered) or "none"
        raise UserError(f"No spec `{sorted(unknown)[0]}` was run in {here.root}. Known: {known}.")
    kept = [one for one in remembered if one not in forgotten]
    needed = {work for name in spec for work in _works(_load(name))}
    for one in kept:
        needed |= set(_works(_parse(here, one.id, one.spec)))
    garbage = collect.plan_gc(here, needed)
    typer.echo(f"Kept: what {', '.join([one.id for one in kept] + list(spec)) or 'no spec'} needs.")
    for kind, items in garbage.by_kind().items():
        typer.echo(f"{WORDS[kind]:<32} {len(items):>5}  {_bytes(sum(item.bytes for item in items)):>10}")
    if garbage.note:
        typer.echo(f"Note. {garbage.note}")
    if not yes:
        ending = " Nothing was deleted: add --yes." if garbage.items or forgotten else ""
        typer.echo(f"{_bytes(garbage.bytes)} can be freed.{ending}")
        return
    for one in forgotten:
        here.delete(one.path)
    # Whoever runs one of them from now on is seen: it is remembered again.
    garbage = dataclasses.replace(garbage, specs=garbage.specs - {one.id for one in forgotten})
    deleted: Sequence[Item] = collect.collect(garbage)
    typer.echo(f"{_bytes(sum(item.bytes for item in deleted))} freed.")
    if left := len(garbage.items) - len(deleted):
        typer.echo(f"{left} stay: they were taken into use meanwhile.")


WORDS = {
    "artifact": "artifacts that no spec needs",
    "partial": "saved states of stopped runs",
    "temporary": "what killed runs left",
    "damaged": "damaged artifacts",
    "failure": "records of failures",
}


@store.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write, such as results.tar.")],
    keys: KeysArgument = [],  # noqa: B006
    spec: SpecOption = [],  # noqa: B006
    root: StoreOption = None,
) -> None:
    """Write artifacts into one file: those named, those of a spec, or all."""
    from testbed import archive

    here = Store(root or default_root())
    wanted = set(_artifacts(here, keys)) if keys or not spec else set()
    for name in spec:
        works = _works(_load(name))
        if absent := [work for work in works if not here.has(*work)]:
            raise UserError(f"{len(absent)} of {_count(works)} of {name} are not in {here.root}: run the spec first.")
        wanted |= set(works)
    size = archive.export(here, sorted(wanted), file)
    typer.echo(f"{file}  {_count(wanted)}, {_bytes(size)}")


@store.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive that `export` wrote.")],
    root: StoreOption = None,
) -> None:
    """Take in the artifacts of an archive that are not there yet: all of them, or none where anything is wrong."""
    from testbed import archive

    here = Store(root or default_root())
    done = archive.import_(here, file)
    typer.echo(f"{_count(done.added)} added, {len(done.present)} were there already; store {here.root}")


def _row(here: Store, shelf: str, key: str) -> dict[str, Any]:
    from testbed.collect import size

    path = here.path(shelf, key)
    manifest = here.examine(shelf, key, read=False)[1] if path.exists() else {}
    failure = here.failure(shelf, key)
    return {
        "shelf": shelf,
        "key": key,
        "kind": manifest.get("kind", ""),
        "name": manifest.get("name", failure.label if failure and not manifest else ""),
        "state": _state(here, shelf, key),
        "bytes": size(path) if path.exists() else None,
        "made": manifest.get("made", ""),
    }


def _state(here: Store, shelf: str, key: str) -> str:
    """As the store has it, and where an artifact is there and cannot be used, that."""
    state = here.state(shelf, key)
    return "damaged" if state == "missing" and here.path(shelf, key).exists() else state


def _artifacts(here: Store, starts: Sequence[str]) -> list[tuple[str, str]]:
    """Every artifact, damaged ones too, or those that the starts of keys name."""
    if not starts:
        return [work for work in here.known() if here.path(*work).exists()]
    named = [_one(here, start) for start in starts]
    for shelf, key in named:
        if not here.path(shelf, key).exists():
            raise UserError(f"There is no artifact {shelf}/{key} in {here.root}: it is {_state(here, shelf, key)}.")
    return named


def _one(here: Store, start: str) -> tuple[str, str]:
    """The one that a start of a key names."""
    shelf, slash, prefix = start.partition("/")
    if not slash:
        shelf, prefix = "", start
    known = [one for one in here.known() if (not shelf or one[0] == shelf) and one[1].startswith(prefix)]
    # The key of a stage is the start of its checkpoints' keys.
    found = [one for one in known if one[1] == prefix] or [one for one in known if "@" not in one[1]] or known
    if len(found) != 1:
        many = ", ".join(f"{shelf}/{_short(key)}" for shelf, key in found[:5])
        raise UserError(
            f"`{start}` is the start of {len(found)} keys in {here.root} ({many}); give more of it, or <shelf>/<key>."
            if found
            else f"No key in {here.root} starts with `{start}`; `testbed store list` shows them."
        )
    return found[0]


def _load(spec: str) -> Spec:
    from testbed.spec import load

    return load(spec)


def _parse(here: Store, name: str, raw: dict[str, Any] | None) -> Spec:
    """A remembered spec. What it needs must not be lost because this version cannot read it."""
    from testbed.spec import parse

    try:
        if raw is None:
            raise UserError("its file cannot be read.")
        return parse(raw, source=name)
    except UserError as error:
        raise UserError(
            f"The spec {name}, which was run in {here.root}, cannot be read by this version, so what it needs is not "
            f"known and nothing was deleted: {' '.join(str(error).split())} If its results may go, add --forget {name}."
        ) from error


def _works(spec: Spec) -> list[tuple[str, str]]:
    """Shelf and key of everything in a spec's graph."""
    from testbed.graph import build
    from testbed.nodes import shelf

    return [(shelf(node.kind), key) for key, node in build(spec).nodes.items()]


def _short(key: str) -> str:
    """Enough of a key to tell it, and the step of a checkpoint."""
    start, at, step = key.partition("@")
    return start[:12] + at + step


def _count(works: Collection[tuple[str, str]]) -> str:
    return f"{len(works)} artifact{'s' * (len(works) != 1)}"


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 99.5 else f"{size:.1f} {units[0]}"


def _text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, indent=1))
