"""`testbed store`: what it prints, what it deletes, and that a mistake is a paragraph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from testbed.cli import _Group
from testbed.graph import Graph, build
from testbed.leases import hold
from testbed.nodes import Node, shelf
from testbed.spec import load
from testbed.store import MANIFEST, Store
from testbed.store_commands import _bytes
from testbed.store_commands import store as commands

app = typer.Typer(cls=_Group, pretty_exceptions_enable=False)
app.add_typer(commands, name="store")


@app.callback()
def root() -> None: ...


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_STORE", raising=False)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return build(load("smoke"))


@pytest.fixture
def here(tmp_path: Path, graph: Graph) -> Store:
    """A store in which the smoke spec was run."""
    store = Store(tmp_path / "runs", announce=lambda text: None)
    store.prepare()
    store.remember("smoke", graph.spec.model_dump(mode="json"))
    for node in graph.nodes.values():
        make(store, node)
    return store


def make(store: Store, node: Node) -> None:
    with store.publish(shelf(node.kind), node.key) as draft:
        (draft.out / "data").write_bytes(b"x" * 1000)
        draft.manifest = {"kind": node.kind, "name": node.name, "summary": {"flops": 1.5}, "inputs": node.parents}


def stray(store: Store, key: str = "f" * 32) -> Path:
    with store.publish("stages", key) as draft:
        (draft.out / "data").write_bytes(b"x" * 100_000)
        draft.manifest = {"kind": "pretrain", "name": "stray", "summary": {}}
    return store.path("stages", key)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["store", *arguments])


def said(*arguments: str, status: int = 0) -> str:
    result = call(*arguments)
    assert result.exit_code == status, result.output
    assert result.stderr == ""
    return result.stdout


def refused(*arguments: str) -> str:
    """One paragraph on stderr, status 2, nothing written."""
    before = sorted(Path.cwd().rglob("*"))
    result = call(*arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert sorted(Path.cwd().rglob("*")) == before
    return result.stderr


def damage(path: Path) -> None:
    data = bytearray((path / "data").read_bytes())
    data[0] ^= 1
    (path / "data").write_bytes(data)


def test_list_tells_what_is_there_and_how_it_stands(here: Store, graph: Graph) -> None:
    path = stray(here, "e" * 32)
    (path / MANIFEST).unlink()
    here.fail("evaluations", "d" * 32, label="evaluation of mid, seed 0", reason="No memory.", trace="")
    with here.publish(f"partial/stages-{'c' * 32}", "000000010") as draft:
        (draft.out / "a").touch()
    with here.lease("stages", "b" * 32):
        rows = json.loads(said("list", "--format", "json"))
        table = said("list")
    assert len(rows) == len(graph.nodes) + 4
    by_key = {row["key"]: row for row in rows}
    states = [by_key[letter * 32]["state"] for letter in "bcde"]
    assert states == ["running", "partial", "failed", "damaged"]
    assert by_key["d" * 32]["name"] == "evaluation of mid, seed 0" and by_key["d" * 32]["bytes"] is None
    key, node = next(iter(graph.nodes.items()))
    row = by_key[key]
    assert (row["shelf"], row["kind"], row["name"], row["state"]) == (shelf(node.kind), node.kind, node.name, "done")
    assert 1000 < row["bytes"] < 3000 and row["made"].startswith("20")
    line = next(line for line in table.splitlines() if key[:12] in line)
    assert key not in line and node.name in line and "kB" in line and "done" in line
    assert said("list", "--store", "none", "--format", "json") == "[]\n"
    assert not Path("none").exists()


def test_show_prints_a_manifest(here: Store, graph: Graph) -> None:
    key = next(key for key, node in graph.nodes.items() if node.kind == "pretrain")
    shown = json.loads(said("show", key[:8], "--format", "json"))
    assert shown["key"] == key and shown["summary"] == {"flops": 1.5} and shown["state"] == "done"
    text = said("show", f"stages/{key[:8]}")
    assert "summary     flops: 1.5" in text and "file        data  1.0 kB" in text and key in text
    here.fail("probes", "d" * 32, label="probe", reason="No memory.", trace="Traceback")
    assert "No memory." in said("show", "probes/")


def test_a_stage_is_meant_before_its_checkpoints(here: Store) -> None:
    stray(here)
    with here.publish("checkpoints", f"{'f' * 32}@20") as draft:
        draft.manifest = {"summary": {}}
    assert json.loads(said("show", "ffff", "--format", "json"))["name"] == "stray"
    assert json.loads(said("show", "checkpoints/ffff", "--format", "json"))["key"].endswith("@20")
    assert json.loads(said("show", f"{'f' * 32}@20", "--format", "json"))["key"].endswith("@20")


def test_a_key_that_names_nothing_or_much_is_said(here: Store) -> None:
    stray(here, "f" * 32)
    stray(here, "f" * 31 + "e")
    assert "`ffff` is the start of 2 keys" in refused("show", "ffff")
    assert "No key in" in refused("show", "xyz") and "No key in" in refused("verify", "xyz")
    assert "No key in" in refused("show", "corpora/ffff")
    here.fail("probes", "d" * 32, label="probe", reason="x", trace="")
    assert "There is no artifact probes/ddd" in refused("verify", "dddd")
    (here.path("stages", "f" * 32) / MANIFEST).unlink()
    assert "is damaged" in refused("show", "f" * 32)


def test_verify_reads_everything_and_touches_nothing(here: Store, graph: Graph) -> None:
    assert said("verify") == f"{len(graph.nodes)} artifacts, all whole.\n"
    keys = list(graph.nodes)
    damaged = {key: here.path(shelf(graph.nodes[key].kind), key) for key in keys[:2]}
    for path in damaged.values():
        damage(path)
    lines = said("verify", status=1).splitlines()
    assert sorted(lines[:-1]) == sorted(
        f"{path.parent.name}/{path.name} is damaged (data differs from its digest)" for path in damaged.values()
    )
    assert lines[-1].startswith(f"2 of {len(keys)} artifacts cannot be used")
    assert all(path.exists() for path in damaged.values()) and not (here.root / "damaged").exists()
    assert "1 artifact, all whole." in said("verify", keys[2])
    assert keys[0] in said("verify", keys[0][:12], keys[2], status=1)


def test_gc_says_what_it_would_do_and_does_it_when_told(here: Store, graph: Graph) -> None:
    assert "0 B can be freed.\n" in said("gc")
    path = stray(here)
    (here.root / "damaged" / "x").mkdir(parents=True)
    (here.root / "damaged" / "x" / "a").write_bytes(b"x" * 5000)
    text = said("gc")
    assert f"Kept: what {here.remembered()[0].id} needs." in text
    assert "artifacts that no spec needs         1" in text and "damaged artifacts                    1" in text
    assert "105 kB can be freed. Nothing was deleted: add --yes." in text and path.exists()
    assert "105 kB freed." in said("gc", "--yes")
    assert not path.exists() and not list((here.root / "damaged").iterdir())
    assert all(here.has(shelf(node.kind), key) for key, node in graph.nodes.items())


def test_a_spec_is_kept_unless_it_is_forgotten(here: Store, graph: Graph) -> None:
    one = here.remembered()[0]
    assert "No spec `none` was run" in refused("gc", "--forget", "none")
    text = said("gc", "--forget", "smoke")
    assert "Kept: what no spec needs." in text and f"{len(graph.nodes)} " in text and "add --yes" in text
    assert one.path.exists() and here.has("stages", here.keys("stages")[0])
    # A spec named beside them is kept for this once.
    said("gc", "--forget", one.id, "--spec", "smoke", "--yes")
    assert not one.path.exists() and len(here.keys("stages")) > 0
    said("gc", "--yes")
    assert here.known() == []


def test_a_spec_of_another_version_loses_nothing_silently(here: Store) -> None:
    path = here.remember("old", {"name": "old", "flavour": "strange"})
    kept = stray(here)
    text = refused("gc", "--yes")
    assert path.stem in text and f"--forget {path.stem}" in text and "nothing was deleted" in text
    path.write_text("{")
    assert f"--forget {path.stem}" in refused("gc")
    said("gc", "--forget", "old", "--yes")
    assert not kept.exists() and len(here.remembered()) == 1


def test_gc_leaves_what_is_under_way(here: Store) -> None:
    path = stray(here)
    with here.lease("stages", "b" * 32):
        assert "makes stages/bbb" in said("gc", "--yes")
    assert path.exists()


def test_what_is_taken_between_plan_and_deletion_stays(here: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from testbed import collect

    path = stray(here)
    real = collect.collect

    def later(garbage: collect.Garbage) -> list[collect.Item]:
        leases = here.root / "leases"
        with hold(leases / f"stages-{path.name}.json", guard=leases / ".guard"):
            return real(garbage)

    monkeypatch.setattr(collect, "collect", later)
    assert "0 B freed.\n1 stay" in said("gc", "--yes") and path.exists()


def test_results_are_carried_to_another_store(here: Store, graph: Graph) -> None:
    stray(here)
    count = len(graph.nodes)
    assert said("export", "all.tar").startswith(f"all.tar  {count + 1} artifacts, ")
    assert said("export", "spec.tar", "--spec", "smoke").startswith(f"spec.tar  {count} artifacts, ")
    assert said("export", "one.tar", "ffff").startswith("one.tar  1 artifact, ")
    assert f"{count + 1} artifacts" in said("export", "both.tar", "ffff", "--spec", "smoke")
    assert f"{count} artifacts added, 0 were there already" in said("import", "spec.tar", "--store", "other")
    assert f"1 artifact added, {count} were there already" in said("import", "all.tar", "--store", "other")
    assert f"{count + 1} artifacts, all whole." in said("verify", "--store", "other")


def test_export_and_import_refuse_in_a_paragraph(here: Store, graph: Graph) -> None:
    node = next(iter(graph.nodes.values()))
    damage(here.path(shelf(node.kind), node.key))
    assert "is damaged" in refused("export", "a.tar", "--spec", "smoke")
    here.discard(shelf(node.kind), node.key)
    assert f"1 of {len(graph.nodes)} artifacts of smoke are not in" in refused("export", "a.tar", "--spec", "smoke")
    Path("text.tar").write_text("text")
    with here.lease("stages", "k"):
        pass  # the guard of all leases is made and stays
    assert "is no tar archive" in refused("import", "text.tar")
    assert "none.tar" in refused("import", "none.tar", "--store", "new")


def test_sizes_are_rounded() -> None:
    sizes = (0, 999, 1000, 99_499, 99_500, 999_499, 999_500, 1.5e12)
    assert [_bytes(int(size)) for size in sizes] == [
        "0 B", "999 B", "1.0 kB", "99.5 kB", "100 kB", "999 kB", "1.0 MB", "1.5 TB"
    ]  # fmt: skip
