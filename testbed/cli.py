"""The `testbed` command: one function a command; what it needs is imported when it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from testbed import store_commands
from testbed.errors import UserError
from testbed.store import Store, default_root

if TYPE_CHECKING:
    import pandas as pd

    from sweeps.local import Outcome
    from testbed.planning import Plan
    from testbed.schema import Spec
    from testbed.tables import Tables


class _Group(TyperGroup):
    """Mistakes of the person who called end with a paragraph and status 2, an interrupt with status 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo(f"Stopped at once. What was finished or saved is kept. To go on: {_this_command()}", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Raise a small transformer from nothing and attribute what it can do to the stage that taught it.",
)
tasks = typer.Typer(no_args_is_help=True, help="List, show, sample and verify reasoning tasks.")
app.add_typer(tasks, name="tasks")
app.add_typer(store_commands.store, name="store")

SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="A built-in spec, such as quickstart, or a YAML file.")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="PATH=VALUE", help="Change a field, such as stages.mid.tokens=20000.")
]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Folder of results (default: $TESTBED_STORE, or ./runs).")
]


class Format(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


class PlanFormat(StrEnum):
    table = "table"
    json = "json"


class Split(StrEnum):
    train = "train"
    validation = "validation"
    test = "test"
    rl = "rl"
    held_out = "held_out"


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        from testbed.conditions import versions

        typer.echo(f"testbed {versions()['reasoning-testbed']}")
        raise typer.Exit


@app.command()
def run(
    spec: SpecArgument,
    changes: SetOption = [],  # noqa: B006 (typer copies it)
    store: StoreOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a core).")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the spec, show what would run, write nothing.")
    ] = False,
    wandb: Annotated[
        bool, typer.Option("--wandb", help="Copy metrics to wandb (offline where there is no key).")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed in an earlier run.")] = False,
    devices: Annotated[
        int, typer.Option(min=1, help="Processes (or GPUs) that train one stage together, data parallel.")
    ] = 1,
    save_every: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time between two saves of a stage under way.")
    ] = 60.0,
    other_class: Annotated[
        bool,
        typer.Option("--other-class", help="Go on from states saved under another numeric class; results are marked."),
    ] = False,
) -> None:
    """Make everything a spec asks for that the store does not have, and tell what came out."""
    from sweeps.local import Event, run_graph
    from testbed.execute import Conduct
    from testbed.graph import build
    from testbed.spec import load
    from testbed.tracking import ProgressLine, duration

    line = ProgressLine()
    here = _store(store, announce=line.say)
    if dry_run:
        from testbed.planning import plan as planned

        _show_plan(planned([load(spec, changes)], here, probe=False, workers=workers))
        return
    graph = build(load(spec, changes))

    def tell(event: Event) -> None:
        if event.kind in ("failed", "note"):
            name = event.node.label if event.node else ""
            line.say(f"{name}: {event.text}" if event.kind == "note" else f"{name} failed: {event.text}")
        elif event.line:
            line.show(event.line)

    try:
        outcome = run_graph(
            graph,
            here,
            workers=workers,
            on_event=tell,
            conduct=Conduct(
                group=graph.spec.name,
                wandb=graph.spec.name if wandb else None,
                save_every=save_every,
                other_class=other_class,
                devices=devices,
            ),
            retry=retry,
        )
    finally:
        line.clear()
    made, reused = len(outcome.made), len(outcome.reused)
    if outcome.stopped:
        typer.echo(
            f"Stopped: {made} made, {reused} reused; what was under way is saved. To go on: {_this_command()}",
            err=True,
        )
        raise typer.Exit(130)
    if not outcome.ok:
        failed, skipped = len(outcome.failed), len(outcome.skipped)
        first, (cause, trace) = next(iter(outcome.failed.items()))
        typer.echo(
            f"Error: {failed} of {len(graph.nodes)} nodes failed and {skipped} that need them were left out; {made} "
            f"were made and {reused} reused, and all of these are kept. First, {graph.nodes[first].label}: {cause} "
            f"{f'The traceback is in {trace}. ' if trace else ''}{_again(outcome)}",
            err=True,
        )
        raise typer.Exit(1)
    found = f", {len(outcome.found)} found made" if outcome.found else ""
    typer.echo(f"{made} made{found}, {reused} reused in {duration(outcome.wall_s)}; store {here.root}")
    _conclude(graph.spec, here, changes)


@app.command()
def plan(
    specs: Annotated[
        list[str], typer.Argument(metavar="SPEC...", help="Built-in specs, such as quickstart, or YAML files.")
    ],
    format: Annotated[PlanFormat, typer.Option("--format", help="How to print it.")] = PlanFormat.table,
    every: Annotated[bool, typer.Option("--all", help="One row a node, not one for all its repetitions.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Time a few steps on this machine, for some seconds.")
    ] = True,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the stages (.png, .svg or .pdf).")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of the run (default: one a core).")] = None,
    changes: SetOption = [],  # noqa: B006
    store: StoreOption = None,
) -> None:
    """What a run would do and take: every node with its state, tokens, FLOPs, memory and time. Writes nothing else."""
    from testbed.execute import set_threads
    from testbed.machine import cores
    from testbed.planning import plan as planned
    from testbed.spec import load

    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--picture {picture}: a picture is a .png, .svg or .pdf file.")
    # Before torch is imported: its threads are to be as those of a worker.
    set_threads(max(1, cores() // (workers or cores())))
    found = planned([load(spec, changes) for spec in specs], _store(store), probe=probe, workers=workers)
    if picture is not None:
        _draw_plan(picture, found)
    if format is PlanFormat.json:
        import json

        typer.echo(json.dumps(found.record(), indent=1, allow_nan=False))
    else:
        _show_plan(found, every=every)


@app.command()
def results(
    spec: SpecArgument,
    format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
    claims: Annotated[bool, typer.Option("--claims", help="The claims with interval and verdict instead.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    changes: SetOption = [],  # noqa: B006
    store: StoreOption = None,
) -> None:
    """What a finished run found, by arm, seed and operations."""
    import analysis
    from analysis.claims import table as claims_table
    from testbed import show

    tables = _tables(spec, changes, store)
    if format is Format.table:
        verdicts = show.judged(tables)
        shown = [show.verdicts(verdicts)] if claims else show.experiment(tables, verdicts, show.attribution(tables)[0])
        out = show.console()
        with out.capture() as captured:
            out.print(*shown)
        _emit(captured.get().rstrip("\n"), output)
        return
    if claims:
        table = claims_table(show.judged(tables))
    else:
        table = analysis.results(tables.outcomes, k=tables.spec.evaluation.k)
    if format is Format.json:
        _emit(show.records(table), output)
    elif format is Format.csv:
        _emit(analysis.flat(table).to_csv(index=False).rstrip("\n"), output)
    else:
        if output is None:
            raise UserError("--format parquet is binary and needs a file: add --output results.parquet.")
        flat: pd.DataFrame = analysis.flat(table)
        _write(output, lambda path: flat.to_parquet(path, index=False))


@app.command()
def report(spec: SpecArgument, changes: SetOption = [], store: StoreOption = None) -> None:  # noqa: B006
    """Write the report and figures of a finished run anew."""
    from testbed.spec import load

    _conclude(load(spec, changes), _store(store), changes, brief=True)


class ExportFormat(StrEnum):
    safetensors = "safetensors"
    hf = "hf"


@app.command()
def export(
    stage: Annotated[str, typer.Argument(help="A key, the start of one, or spec/stage[@step][/seed].")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    format: Annotated[
        ExportFormat, typer.Option("--format", help="hf: for transformers, where it computes the same logits.")
    ] = ExportFormat.safetensors,
    store: StoreOption = None,
) -> None:
    """Write the model of a stage as files that others read."""
    from testbed.notebook import export as written
    from testbed.notebook import load

    for path in written(*load(stage, store=_store(store).root), out, format=format.value):
        typer.echo(path)


@app.command()
def doctor(store: StoreOption = None) -> None:
    """What this machine has, and what that means."""
    from rich.table import Table
    from rich.text import Text

    from testbed.doctor import examine
    from testbed.show import console

    table = Table("", "found", "which means", show_lines=False)
    findings = list(examine(store or default_root()))
    for finding in findings:
        table.add_row(finding.what, finding.found, Text(finding.means, style="" if finding.ok else "red"))
    console().print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(2)


@tasks.command("list")
def list_() -> None:
    """Every task in one line."""
    from synthetic_tasks import list_tasks

    for name, description in list_tasks().items():
        typer.echo(f"{name}  {description}")


TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="Name of a task.")]
SettingOption = Annotated[list[str], typer.Option("--setting", metavar="NAME=VALUE", help="A setting of the task.")]


@tasks.command("show")
def show_task(task: TaskArgument, setting: SettingOption = []) -> None:  # noqa: B006
    """Settings, tokens, roles and statuses of a task."""
    from testbed.completions import describe

    typer.echo(describe(_task(task, setting)))


@tasks.command("sample")
def sample(
    task: TaskArgument,
    operations: Annotated[int | None, typer.Option(help="Difficulty (default: the task's grid).")] = None,
    seed: int = 0,
    index: Annotated[int, typer.Option(min=0, help="The first problem's place in the stream.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    split: Split = Split.train,
    axis: Annotated[list[str], typer.Option("--axis", metavar="NAME=VALUE", help="A value of an axis.")] = [],  # noqa: B006
    setting: SettingOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print problems with their gold traces."""
    from testbed.completions import problem_record, problem_text

    drawn = _task(task, setting)
    cell: dict[str, Any] = {"split": split.value} if split is not Split.train else {}
    if operations is not None:
        cell["operations"] = operations
    if setting:
        cell["settings"] = _settings(setting)
    if axis:
        cell["axes"] = _settings(axis, "--axis")
    try:
        problems = drawn.sample_batch(
            seed, index, count, operations=operations, split=split.value, **cell.get("axes", {})
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    for problem in problems:
        typer.echo(_json(problem_record(problem, cell)) if json else problem_text(problem))


@tasks.command("verify")
def verify(
    file: Annotated[Path, typer.Argument(help="JSON lines: task, cell, seed, index, completion; - reads stdin.")],
) -> None:
    """Judge completions: prints each line with its verdict added."""
    from testbed.completions import verify_lines

    try:
        lines = sys.stdin.readlines() if str(file) == "-" else file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error}.") from error
    for entry in verify_lines(lines):
        typer.echo(_json(entry))


def _show_plan(found: Plan, *, every: bool = False) -> None:
    from testbed import show

    show.console().print(*show.plan(found, every=every))
    for line in show.failures(found):
        typer.echo(line)
    for note in found.assumed:
        typer.echo(f"Note. {note}")


def _draw_plan(picture: Path, found: Plan) -> None:
    from paper_figures import style
    from paper_figures.save import UNDATED
    from paper_figures.stage_graph import figure, table

    chart = figure(table(found))
    suffix = picture.suffix[1:]

    def write(path: Path) -> None:
        with style.context():
            chart.savefig(path, format=suffix, metadata=UNDATED.get(suffix))

    _write(picture, write)


def _this_command() -> str:
    """What was typed, to be typed again."""
    import shlex

    return shlex.join(["testbed", *sys.argv[1:]])


def _again(outcome: Outcome) -> str:
    """What the same command does with what failed."""
    if set(outcome.failed) <= set(outcome.passing):
        return "The same command tries again."
    if outcome.failed_before:
        return "What failed in an earlier run is not tried again; --retry does."
    return "The same command with --retry tries again; without it, what failed stays failed."


def _store(path: Path | None, announce: Callable[[str], None] | None = None) -> Store:
    return Store(path or default_root(), announce=announce)


def _tables(spec: str, changes: list[str], store: Path | None) -> Tables:
    from testbed.spec import load
    from testbed.tables import load as load_tables

    return load_tables(load(spec, changes), _store(store))


def _task(name: str, settings: list[str]) -> Any:
    from synthetic_tasks import get_task

    try:
        return get_task(name, **_settings(settings))
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _settings(settings: list[str], option: str = "--setting") -> dict[str, Any]:
    from testbed.reading import read_yaml

    pairs = [setting.partition("=") for setting in settings]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UserError(f"{option} takes name=value, not `{wrong[0]}`.")
    return {name: read_yaml(value, f"{option} {name}") for name, _, value in pairs}


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def _emit(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text)
    else:
        _write(output, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def _write(output: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all."""
    partial = output.with_name(f".{output.name}.partial")
    try:
        write(partial)
        partial.replace(output)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"{output} cannot be written: {error.strerror}.") from error
    typer.echo(f"Wrote {output}", err=True)


def _conclude(spec: Spec, store: Store, changes: list[str], *, brief: bool = False) -> None:
    """Print what an experiment found, write its report and figures, and name them."""
    from paper_figures import Tables as FigureTables
    from paper_figures.report import warnings, write_report
    from paper_figures.save import save_figures
    from testbed import show
    from testbed.provenance import environment_summary, keep_tables, mixed_conditions, spec_summary
    from testbed.tables import guess_floors
    from testbed.tables import load as load_tables

    tables = load_tables(spec, store)
    claims = show.judged(tables)
    attribution, why_not = show.attribution(tables)
    drawn = FigureTables(
        outcomes=tables.outcomes,
        stages=tables.stages,
        curves=tables.curves,
        roles=tables.roles,
        attribution=attribution,
        floors=guess_floors(spec),
        k=spec.evaluation.k,
    )
    if not brief:
        show.console().print(*show.experiment(tables, claims, attribution))
        for warning in filter(None, [*warnings(drawn), mixed_conditions(tables)]):
            typer.echo(f"Note. {warning}")
        if why_not and spec.attribution is not None:
            typer.echo(f"Note. There is no attribution: {why_not}.")
    name = _report_name(spec, changes)
    with store.folder("reports", name) as out:
        write_report(
            out / "report.html",
            title=spec.title or spec.name,
            spec_summary=spec_summary(spec),
            outcomes=drawn.outcomes,
            stages=drawn.stages,
            curves=drawn.curves,
            roles=drawn.roles,
            claims=claims,
            attribution=drawn.attribution,
            environment=environment_summary(tables, store),
            floors=drawn.floors,
            k=drawn.k,
        )
        figures = [path.name for path in save_figures(out / "figures", drawn)]
        keep_tables(out / "tables", tables, claims)
    place = store.root / "reports" / name
    typer.echo(f"Report   {place / 'report.html'}")
    typer.echo(f"Tables   {place / 'tables'}")
    for figure in figures:
        if figure.endswith(".png"):
            typer.echo(f"Figure   {place / 'figures' / figure}")


def _report_name(spec: Spec, changes: list[str]) -> str:
    """The name of the spec; with changes, or where a file took over the name of a built-in spec, a name of its own."""
    from testbed.graph import digest
    from testbed.spec import load, names

    taken = spec.name in names() and spec != load(spec.name)
    return f"{spec.name}-{digest(spec.model_dump(mode='json'))[:8]}" if changes or taken else spec.name
