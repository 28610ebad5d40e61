"""One self-contained HTML page that says what an experiment found, and from what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from analysis import compute
from analysis.attribution import CLIP
from analysis.claims import ClaimResult, Verdict
from analysis.tables import bands, by_band, results
from paper_figures import FIGURES
from paper_figures.base import Tables
from paper_figures.markup import (
    Cell,
    Html,
    definitions,
    element,
    limits,
    minus,
    page,
    picture,
    quantity,
    section,
    table,
)
from paper_figures.roles_by_operations import last_roles
from paper_figures.save import svg_data

# A look-up this close to guessing a leaf means that values are not bound to names.
LOOKUP_MARGIN = 0.05
VERDICTS: tuple[Verdict, ...] = ("shown", "not shown", "undecided", "no signal")
# Share of samples cut off at the token limit that a reader should know of.
TRUNCATED = 0.02


def write_report(
    path: Path,
    *,
    title: str,
    spec_summary: Mapping[str, object] | str,
    outcomes: pd.DataFrame,
    stages: pd.DataFrame,
    curves: pd.DataFrame,
    roles: pd.DataFrame,
    claims: Sequence[ClaimResult],
    attribution: pd.DataFrame,
    environment: Mapping[str, object],
    floors: Mapping[int, float] | None = None,
    k: Sequence[int] = (),
    level: float = 0.95,
) -> Path:
    """Write the report and return its path.

    attribution: from `analysis.attribute`, may be empty. floors: answer-only pass@1 of the best guess, by operations.
    curves and roles may be empty; their sections are then left out.
    """
    tables = Tables(
        outcomes=outcomes,
        stages=stages,
        curves=curves,
        roles=roles,
        attribution=attribution,
        floors=dict(floors or {}),
        k=tuple(k),
        level=level,
    )
    parts = [
        element("h1", title),
        *_answer(tables, claims),
        *_warnings(tables),
        section("How far each arm gets", *_figures(tables, "operations_by_arm", "passk_by_band")),
        _attribution(tables),
        section("Every arm in every band", _bands(tables)),
        section("The edge of competence", *_figures(tables, "competence_map")),
        section("What it cost", _compute(tables)),
        _optional("How the stages trained", tables, "training_curves"),
        _optional("Which tokens are hard", tables, "roles_by_operations"),
        section("How the intervals were made", _methods(tables, claims)),
        section("The experiment", _summary(spec_summary)),
        section("Where the numbers come from", definitions(environment), _keys(stages)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, *parts), encoding="utf-8")
    return path


def _answer(tables: Tables, claims: Sequence[ClaimResult]) -> list[Html]:
    """The finding in words, then verdict by verdict."""
    parts = []
    words = _headline(tables, claims)
    if words:
        parts.append(element("p", *words, kind="lede"))
    if claims:
        counts = Counter(result.verdict for result in claims)
        tally = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        parts.append(element("p", f"Claims written down before the run: {tally}."))
        parts.append(element("div", *map(_claim, claims), kind="claims"))
    return parts


def _headline(tables: Tables, claims: Sequence[ClaimResult]) -> list[object]:
    """Which stage gave what, on the band that the first claim is about (or else where the whole gain is largest)."""
    rows = tables.attribution
    if rows.empty:
        return []
    rows = rows[rows["scale"] == "probability"]
    totals = rows[rows["kind"] == "total"].set_index("band")["estimate"]
    claimed = [result.claim.band for result in claims if result.claim.band in totals.index]
    band = claimed[0] if claimed else str(totals.idxmax())
    here = rows[rows["band"] == band]
    kind = {name: here[here["kind"] == name].to_dict("records") for name in here["kind"].unique()}
    base, total = kind["base"][0], kind["total"][0]
    start, gain = base["estimate"], total["estimate"]
    metric = f"{base['metric']} pass@{base['k']}"
    everything = str(total["effect"]).partition(" − ")[0]
    operations = ", ".join(str(o) for o in base["operations"])
    words: list[object] = [
        f"On the band “{band}” ({operations} operations), {metric} is {start:.2f} for “{base['effect']}” and "
        f"{start + gain:.2f} for “{everything}”. Of this difference of {gain:+.2f}, "
    ]
    shares = sorted(kind["shapley"], key=lambda row: -row["estimate"])
    for number, row in enumerate(shares):
        joint = "" if number == 0 else " and " if number == len(shares) - 1 else ", "
        span = f"({row['low']:+.2f} to {row['high']:+.2f})"
        verb = "gave" if row["low"] > 0 else "took" if row["high"] < 0 else "gave nothing that can be told from 0:"
        words += [
            joint,
            element("strong", str(row["effect"])),
            f" {verb} {row['estimate']:+.2f} {span}",
        ]
    words.append(".")
    for row in kind.get("matched", []):
        arm, _, placebo = str(row["effect"]).partition(" − ")
        words.append(
            f" Against “{placebo}”, which cost the same FLOPs, “{arm}” is "
            f"{'ahead' if row['estimate'] >= 0 else 'behind'}: "
            f"{row['estimate']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})."
        )
    return [word if isinstance(word, Html) else minus(str(word)) for word in words]


def _claim(result: ClaimResult) -> Html:
    claim = result.claim
    delta = "" if claim.delta is None else f" (margin ±{claim.delta:g})"
    expected = {"positive": "above 0", "equivalent": "no gain"}[claim.expect]
    what = f"gain of {claim.arm}" + (f" over the gain of {claim.other}" if claim.other else "")
    found = limits(result.interval.estimate, result.interval.low, result.interval.high, signed=True)
    return element(
        "article",
        element("header", element("h3", claim.text or claim.name), element("span", result.verdict, kind="verdict")),
        element(
            "p",
            f"Expected {expected}{delta}: {what}, {claim.metric} pass@{claim.k} on “{claim.band}”. Found ",
            found,
            ".",
            kind="note",
        ),
        element("p", minus(f"{result.reason[:1].upper()}{result.reason[1:]}."), kind="note"),
        kind=f"claim {result.verdict.replace(' ', '-')}",
    )


def _warnings(tables: Tables) -> list[Html]:
    return [element("p", words, kind="warning note") for words in warnings(tables)]


def warnings(tables: Tables) -> list[str]:
    """What a reader should know before believing the numbers, a sentence each."""
    outcomes, stages = tables.outcomes, tables.stages
    found = []
    shared = sorted(outcomes.loc[outcomes["structures_shared"], "operations"].unique())
    if shared:
        found.append(
            f"Structures shared: at {_listed(shared)} operations there are too few structures to keep them apart, so "
            "test problems there may have the shape of training problems (never the same values)."
        )
    if not stages.empty:
        groups = (
            stages[stages["groups"].fillna(0) > 0].groupby("stage", sort=False)[["groups", "groups_with_signal"]].sum()
        )
        silent = groups[(groups["groups"] > 0) & (groups["groups_with_signal"] == 0)]
        for stage, row in silent.iterrows():
            found.append(
                f"No signal: in stage {stage} none of {row['groups']:.0f} groups had samples of different reward, so "
                "its weights had nothing to move by. It says nothing about what RL could do with signal."
            )
    roles = last_roles(tables)
    if not roles.empty and "guess" in roles.columns:
        lookups = roles[(roles["role"] == "lookup") & roles["guess"].notna()]
        for arm, rows in lookups.groupby("arm", sort=False):
            means = rows.groupby("operations")[["accuracy", "guess"]].mean()
            blind = sorted(means.index[means["accuracy"] <= means["guess"] + LOOKUP_MARGIN])
            if blind:
                found.append(
                    f"Look-ups of {arm} sit at the level of guessing a leaf at {_listed(blind)} operations: it does "
                    "not bind names to values there, and right answers are luck."
                )
    cut = outcomes.groupby(["arm", "operations"], sort=False)[["truncated", "n"]].sum()
    share = cut["truncated"] / cut["n"]
    if (share > TRUNCATED).any():
        arm, operations = share.index[int(share.argmax())]
        found.append(
            f"Truncated: up to {share.max():.0%} of the samples ran into the token limit ({arm} at {operations} "
            "operations); strictly, they count as wrong."
        )
    if outcomes["seed"].nunique() < 3:
        found.append(f"Seeds: {outcomes['seed'].nunique()} training run(s) an arm say little about another run.")
    if int(outcomes["n"].min()) < 2 * max(tables.ks):
        found.append(f"Samples: pass@{max(tables.ks)} from {outcomes['n'].min()} samples a problem is noisy (n < 2k).")
    return found


def _listed(numbers: Sequence[object]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _figures(tables: Tables, *names: str) -> list[Html]:
    parts = []
    for name in names:
        module = FIGURES[name]
        rows = module.table(tables)
        if not rows.empty:
            interval = f" Intervals are at {tables.level:.0%}." if "low" in rows.columns else ""
            parts.append(picture(svg_data(module.figure(rows)), module.claim + interval, alt=module.claim))
    return parts


def _optional(title: str, tables: Tables, name: str) -> Html:
    pictures = _figures(tables, name)
    return section(title, *pictures) if pictures else Html("")


def _attribution(tables: Tables) -> Html:
    rows = tables.attribution
    if rows.empty:
        return Html("")
    names = {
        "base": "start",
        "total": "whole gain",
        "shapley": "Shapley value",
        "interaction": "interaction",
        "matched": "equal FLOPs",
    }
    lines: list[Sequence[Cell | str] | str] = []
    for band, cell in rows.groupby("band", sort=False):
        lines.append(f"{band} ({', '.join(str(o) for o in cell['operations'].iloc[0])} operations)")
        for (kind, effect), pair in cell.groupby(["kind", "effect"], sort=False):
            scales = {row["scale"]: row for row in pair.to_dict("records")}
            note = f" ({pair['note'].iloc[0]})" if pair["note"].iloc[0] else ""
            lines.append(
                [
                    str(effect),
                    f"{names[str(kind)]}{note}",
                    *(
                        Cell(limits(row["estimate"], row["low"], row["high"], signed=kind != "base"))
                        for row in (scales["probability"], scales["logit"])
                    ),
                ]
            )
    first = rows.iloc[0]
    return section(
        "Which stage gave what",
        *_figures(tables, "attribution"),
        table(["effect", "estimand", f"{first['metric']} pass@{first['k']}", "logit"], lines),
        element(
            "p",
            "Shapley values credit each stage with its mean contribution over the orders in which stages can be added, "
            "each at the one dose that was run. The interaction is what both give beyond the sum of each alone; it is "
            "already shared out among the Shapley values. The contrast at equal FLOPs answers another question and "
            "adds up with nothing.",
            kind="note",
        ),
    )


def _bands(tables: Tables) -> Html:
    last = max(tables.ks)
    columns = [("strict", 1), ("strict", last), ("answer", 1), ("answer", last)]
    if last == 1:
        columns = columns[::2]
    cells = {
        (metric, k): by_band(tables.outcomes, metric, k, level=tables.level).set_index(["arm", "band"])  # type: ignore[arg-type]
        for metric, k in columns
    }
    arms = list(compute.arm_stages(tables.outcomes))
    shared = tables.outcomes.groupby("band")["structures_shared"].any()
    lines: list[Sequence[Cell | str] | str] = []
    for band, operations in bands(tables.outcomes).items():
        known = [tables.floors[o] for o in operations if o in tables.floors]
        floor = f"{sum(known) / len(known):.2f}" if len(known) == len(operations) else "unknown"
        note = ", structures shared" if shared[band] else ""
        lines.append(f"{band} ({', '.join(map(str, operations))} operations; best guess of an answer {floor}{note})")
        for arm in arms:
            values = [cells[column].loc[[(arm, band)]].to_dict("records")[0] for column in columns]
            lines.append(
                [arm, *(Cell(limits(v["estimate"], v["low"], v["high"]), share=v["estimate"]) for v in values)]
            )
    return table(["arm", *(f"{metric} pass@{k}" for metric, k in columns)], lines)


def _compute(tables: Tables) -> Html:
    if tables.stages.empty:
        return element("p", "No stages table was given.", kind="note")
    rows = compute.by_arm(tables.stages, compute.arm_stages(tables.outcomes))
    most = float(rows["flops"].max()) or 1.0
    lines: list[Sequence[Cell | str] | str] = [
        [
            str(row["arm"]),
            " → ".join(row["stages"]),
            Cell(quantity(row["tokens"])),
            Cell(quantity(row["samples"])),
            Cell(quantity(row["sampled_tokens"])),
            Cell(quantity(row["flops"]), share=row["flops"] / most),
            Cell(f"{row['wall_s']:.0f} s"),
        ]
        for row in rows.to_dict("records")
    ]
    whole = compute.total(tables.stages)
    return Html(
        table(["arm", "stages", "tokens trained", "samples", "tokens sampled", "FLOPs", "time"], lines)
        + element(
            "p",
            "Each row is one training run (mean over seeds) with every stage that led to it; a stage that arms share "
            "counts in each of them, though it ran once. All seeds and arms together took "
            f"{quantity(whole['flops'])} FLOPs, {quantity(whole['tokens'])} trained and "
            f"{quantity(whole['sampled_tokens'])} sampled tokens.",
            kind="note",
        )
    )


def _methods(tables: Tables, claims: Sequence[ClaimResult]) -> Html:
    outcomes = tables.outcomes
    used = {
        *(method for k in tables.ks for method in by_band(outcomes, "strict", k, level=tables.level)["method"]),
        *(result.interval.method for result in claims),
        *(tables.attribution["method"] if not tables.attribution.empty else ()),
    }
    sizes = results(outcomes, tables.ks).groupby("operations")[["problems", "samples"]].first()
    fewest, most = sizes["problems"].min(), sizes["problems"].max()
    counts = str(most) if fewest == most else f"{fewest} to {most}"
    return Html(
        element(
            "p",
            f"All intervals are at {tables.level:.0%}. They cover new training runs on these fixed problems ({counts} "
            f"of each difficulty, {sizes['samples'].iloc[0]} samples of each): Student’s t over the "
            f"{outcomes['seed'].nunique()} seeds, with every difference paired by seed and problem. Where all seeds "
            "agree exactly, or there is only one, the interval comes from the problems and is never of zero width. "
            "pass@k is the unbiased estimator. On the logit scale a band’s rate is clipped to "
            f"{CLIP:g} and {1 - CLIP:g} first.",
        )
        + element("p", f"Used on this page: {'; '.join(sorted(used))}.", kind="note")
    )


def _summary(spec_summary: Mapping[str, object] | str) -> Html:
    return element("p", spec_summary) if isinstance(spec_summary, str) else definitions(spec_summary)


def _keys(stages: pd.DataFrame) -> Html:
    if stages.empty:
        return Html("")
    lines: list[Sequence[Cell | str] | str] = [
        [str(row["stage"]), Cell(str(row["seed"])), element("span", row["key"], kind="key")]
        for row in stages[["stage", "seed", "key"]].to_dict("records")
    ]
    return element("details", element("summary", "Keys of all stages"), table(["stage", "seed", "key"], lines))


__all__ = ["warnings", "write_report"]
