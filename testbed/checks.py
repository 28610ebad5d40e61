"""What is wrong with a spec as a whole: names that lead nowhere, circles, bands and lengths the task cannot serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from synthetic_tasks import EmptyCellError, Split, list_tasks
from testbed import edges
from testbed.config import RL, Combine, Edge, Parallel, Train
from testbed.errors import nearest
from testbed.nodes import Seeds, split_reference
from testbed.schema import Spec


def check(spec: Spec) -> list[str]:
    """Every mistake, one sentence each, starting with the path of the field."""
    found = list(_check(spec)) or [
        *_check_edges(spec), *_check_parents(spec), *_check_rows(spec), *_check_task(spec),
    ]  # fmt: skip
    return list(dict.fromkeys(f"{sentence.rstrip('.')}." for sentence in found))


def _check(spec: Spec) -> Iterator[str]:
    """Every mistake in how the parts of a spec refer to each other; no task is asked."""
    try:
        spec.seed_sets()
    except ValueError as error:
        yield f"seeds: {error}."
    for i, seeds in enumerate(spec.seeds):
        if isinstance(seeds, Seeds) and seeds.problems:
            yield f"seeds.{i}.problems: all repetitions share their problems; set problem_seed instead."
    if not spec.seeds:
        yield "seeds: give at least one, such as [0, 1, 2]."
    yield from _check_bands(spec)
    yield from _check_data(spec)
    for name, stage in spec.stages.items():
        here = f"stages.{name}"
        if "@" in name or "+" in name:
            yield f"{here}: a stage's name holds no `@` or `+`; these name checkpoints and combinations."
        if stage.parent is not None:
            yield from _refer_stage(f"{here}.parent", stage.parent, spec)
        if isinstance(stage, RL):
            yield from _refer(f"{here}.band", stage.band, spec.bands, "band")
        elif isinstance(stage, Train):
            yield from _refer(f"{here}.data", stage.data, spec.data, "corpus")
            for other in stage.match:
                yield from _refer_stage(f"{here}.match", other, spec)
                if isinstance(spec.stages.get(other), Combine):
                    yield f"{here}.match: `{other}` is a sum and costs nothing; match the stages it is made of."
        elif isinstance(stage, Combine):
            for other in stage.of:
                yield from _refer_stage(f"{here}.of", other, spec)
        else:
            for other in stage.objectives:
                yield from _refer(f"{here}.objectives", other, spec.stages, "stage")
    for name, probe in spec.probes.items():
        for other in (*probe.of, *([probe.against] if probe.against else [])):
            yield from _refer_stage(f"probes.{name}", other, spec)
    yield from _check_cycles(spec)
    if not spec.arms:
        yield "arms: give at least one, such as {pretrained: pretrain}."
    for arm, stage_name in spec.arms.items():
        yield from _refer_stage(f"arms.{arm}", stage_name, spec)
    for stage_name, count in Counter(spec.arms.values()).items():
        if count > 1:
            same = ", ".join(f"`{arm}`" for arm, stage in spec.arms.items() if stage == stage_name)
            yield f"arms: {same} are all the stage `{stage_name}`; arms must differ."
    if spec.attribution is not None:
        for subset, arm in spec.attribution.arms.items():
            yield from _refer(f"attribution.arms.{subset or '(none)'}", arm, spec.arms, "arm")
        for role, arm in spec.attribution.matched.items():
            yield from _refer(f"attribution.matched.{role}", arm, spec.arms, "arm")
    for arm, other in spec.parents.items():
        yield from _refer(f"parents.{arm}", other, spec.arms, "arm")
        yield from _refer("parents", arm, spec.arms, "arm")
    yield from _check_claims(spec)


def _refer(path: str, name: str, known: Iterable[str], what: str) -> Iterator[str]:
    if name not in known:
        yield f"{path}: there is no {what} `{name}`{nearest(name, known)}. Known: {', '.join(known) or 'none'}."


def _refer_stage(path: str, reference: str, spec: Spec) -> Iterator[str]:
    """A stage, or a kept checkpoint of one."""
    name, step = split_reference(reference)
    if step is None and "@" in name:
        yield f"{path}: `{reference}` is no checkpoint; write the stage and a step from 1 on, such as `pretrain@200`."
        return
    yield from _refer(path, name, spec.stages, "stage")
    stage = spec.stages.get(name)
    if step is not None and isinstance(stage, Combine):
        yield f"{path}: `{name}` combines checkpoints in no steps; it has none of its own."
    if step is not None and isinstance(stage, Parallel) and (step % stage.every or step > stage.steps):
        yield f"{path}: `{name}` has checkpoints after multiples of {stage.every} steps up to {stage.steps}."
    if step is not None and isinstance(stage, RL) and stage.steps is not None and step > stage.steps:
        yield f"{path}: `{name}` has {stage.steps} steps, not {step}."


def _check_bands(spec: Spec) -> Iterator[str]:
    if not spec.bands:
        yield "bands: give at least one, such as {in_range: [1, 2, 3]}."
    owner: dict[int, str] = {}
    for name, operations in spec.bands.items():
        if not operations:
            yield f"bands.{name}: the band is empty; list the operations it holds, such as [5, 6]."
        for o in operations:
            if o < 1:
                yield f"bands.{name}: operations must be at least 1, not {o}."
            if o in owner:
                yield f"bands.{name}: {o} operations already belong to the band `{owner[o]}`."
            owner[o] = name


def _check_data(spec: Spec) -> Iterator[str]:
    for name, data in spec.data.items():
        if data.replay is not None:
            yield from _refer(f"data.{name}.replay", data.replay, spec.data, "corpus")
    links = {name: [data.replay] if data.replay else [] for name, data in spec.data.items()}
    if cycle := _cycle(links):
        yield f"data.{cycle[0]}.replay: {' → '.join(cycle)} is a circle."


def _check_cycles(spec: Spec) -> Iterator[str]:
    links: dict[str, list[str]] = {}
    for name, stage in spec.stages.items():
        before = [stage.parent] if stage.parent else []
        if isinstance(stage, Train):
            before += stage.match
        elif isinstance(stage, Combine | Parallel):
            before += stage.of if isinstance(stage, Combine) else stage.objectives
        links[name] = [split_reference(other)[0] for other in before]
    if cycle := _cycle(links):
        yield f"stages.{cycle[0]}: {' → '.join(cycle)} is a circle; a stage cannot depend on itself."


def _check_edges(spec: Spec) -> Iterator[str]:
    """Whether every stage states what crosses from its parent, and its settings come to the same; asked when all names
    are right and lead in no circle."""
    wrong = [
        sentence
        for name, stage in spec.stages.items()
        if isinstance(stage, Parallel)
        for sentence in _check_objectives(spec, f"stages.{name}", stage)
    ]
    if wrong:
        yield from wrong
        return
    for name, stage in spec.stages.items():
        here = f"stages.{name}"
        if not isinstance(stage, Train | RL) or stage.parent is None:
            continue
        settings = edges.edge(spec, name)
        assert settings is not None
        if stage.edge is None:
            yield (
                f"{here}.edge: state what crosses from `{stage.parent}`; these settings come to "
                f"`{edges.written(settings)}`"
            )
            continue
        if stage.edge.optimizer == "carry" and (why := _nothing_to_carry(spec, stage)):
            yield f"{here}.edge.optimizer: there is nothing to carry on: {why}; set it to reset"
        yield from _check_edge(here, stage, stage.edge, settings)


def _check_edge(here: str, stage: Train | RL, stated: Edge, settings: Edge) -> Iterator[str]:
    if stated.parent != settings.parent:
        is_ = f"`{stage.parent}` is {settings.parent} where it is left"
        yield f"{here}.edge.parent: stated as {stated.parent}, but {is_}"
    if stated.rate != settings.rate:
        means = {
            "continue": "goes on at the rate its parent ended with",
            "rewarm": f"warms up over {stage.schedule.warmup:g} of its steps",
            "restart": "starts at another rate than its parent ended with, without a warm-up",
        }
        yield f"{here}.edge.rate: stated as {stated.rate}, but the stage {means[settings.rate]} ({settings.rate})"


def _nothing_to_carry(spec: Spec, stage: Train | RL) -> str | None:
    """Why a stage finds no optimizer state of its kind in its parent."""
    parent = spec.stages[split_reference(str(stage.parent))[0]]
    if isinstance(parent, Combine | Parallel):
        return f"`{stage.parent}` is a {parent.kind} stage, which leaves no optimizer state"
    if parent.optimizer.kind != stage.optimizer.kind:
        return f"`{stage.parent}` trains with {parent.optimizer.kind}, this stage with {stage.optimizer.kind}"
    return None


def _check_objectives(spec: Spec, here: str, stage: Parallel) -> Iterator[str]:
    stages = {name: spec.stages[name] for name in stage.objectives}
    for name, objective in stages.items():
        if not isinstance(objective, Train | RL) or objective.parent is None:
            yield f"{here}.objectives: `{name}` is no training stage that continues a parent"
    if len(parents := list(dict.fromkeys(objective.parent for objective in stages.values()))) > 1:
        yield f"{here}.objectives: all continue one parent, not {' and '.join(map(str, parents))}"


def _check_rows(spec: Spec) -> Iterator[str]:
    """A corpus that is read on by a later stage is packed into rows of the same length; asked when all names are
    right."""
    Rows = dict[str, tuple[int, str]]  # of every corpus the length, and who read it last
    known: dict[str, Rows] = {}

    def inputs(name: str) -> list[Rows]:
        stage = spec.stages[name]
        objectives = tuple(stage.objectives) if isinstance(stage, Parallel) else ()
        return [read(split_reference(other)[0]) for other in (*spec.parents_of(name), *objectives)]

    def own(name: str) -> Rows:
        stage = spec.stages[name]
        return {stage.data: (stage.row_length, name)} if isinstance(stage, Train) else {}

    def read(name: str) -> Rows:
        if name not in known:
            found: Rows = {}
            for rows in (*inputs(name), own(name)):
                found |= rows
            known[name] = found
        return known[name]

    for name in spec.stages:
        for data, (length, reader) in read(name).items():
            others = [rows[data] for rows in inputs(name) if data in rows and rows[data][0] != length]
            if others:
                field = "row_length" if own(name) else spec.stages[name].kind
                yield (
                    f"stages.{name}.{field}: `{others[0][1]}` read the corpus `{data}` in rows of {others[0][0]}, and "
                    f"`{reader}` in rows of {length}; what goes on where another stopped takes the same"
                )
                break


def _cycle(links: Mapping[str, Iterable[str]]) -> list[str]:
    """A closed path along the links, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in links.get(name, ()):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in links if (found := walk(name, []))), [])


def _check_claims(spec: Spec) -> Iterator[str]:
    for name, count in Counter(claim.name for claim in spec.claims).items():
        if count > 1:
            yield f"claims: `{name}` names {count} claims; names must differ."
    for i, claim in enumerate(spec.claims):
        here = f"claims.{i}"
        for field, arm in (("arm", claim.arm), ("other", claim.other)):
            if arm is not None:
                yield from _refer(f"{here}.{field}", arm, spec.arms, "arm")
        yield from _refer(f"{here}.band", claim.band, spec.bands, "band")
        if claim.k not in spec.evaluation.k and claim.k != 1:
            yield f"{here}.k: {claim.k} is not among evaluation.k {list(spec.evaluation.k)}."


def _check_parents(spec: Spec) -> Iterator[str]:
    """Whether every claim's arm has one arm to be compared with; asked when all names are right."""
    try:
        parents = spec.parent_arms()
    except ValueError as error:
        yield f"parents: {error}."
        return
    if circle := _cycle({arm: [parent] if parent else [] for arm, parent in parents.items()}):
        yield f"parents: {' → '.join(circle)} is a circle; a gain is measured from what came before."
        return
    for i, claim in enumerate(spec.claims):
        for arm in (claim.arm, claim.other):
            if arm is not None and parents[arm] is None:
                yield f"claims.{i}: the arm `{arm}` continues no other arm, so it has no gain; name one in `parents`."


def _check_task(spec: Spec) -> Iterator[str]:
    """Ask the task for one problem of every cell that the spec will draw from."""
    if spec.task.name not in list_tasks():
        yield from _refer("task.name", spec.task.name, list_tasks(), "task")
        return
    try:
        task = spec.task.build()
    except (ValueError, TypeError) as error:
        yield f"task.settings: {error}"
        return
    for path, operations, split in dict.fromkeys(_cells(spec)):
        try:
            problem = task.sample(seed=spec.problem_seed, index=0, operations=operations, split=split)
        except EmptyCellError as error:
            yield f"{path}: no problem of {operations} operations is left for the {split} split: {error}"
            continue
        except ValueError as error:
            yield f"{path}: {operations} operations do not fit the task's settings: {error}"
            continue
        yield from _check_lengths(spec, path, operations, len(problem.prompt.split()), len(problem.solution.split()))


def _cells(spec: Spec) -> Iterator[tuple[str, int, Split]]:
    for name, band in spec.bands.items():
        yield from ((f"bands.{name}", o, spec.evaluation.split) for o in band)
        # Stages probe every band on validation problems as they train.
        yield from ((f"bands.{name}", o, "validation") for o in band)
    for name in spec.data:
        mixed = {o for part in spec.components(name) for o in part.operations}
        yield from ((f"data.{name}.operations", o, "train") for o in sorted(mixed))
    for name, stage in spec.stages.items():
        if isinstance(stage, RL):
            yield from ((f"stages.{name}.band", o, stage.split) for o in spec.bands[stage.band])
    for name, probe in spec.probes.items():
        if probe.measure == "roles":
            yield from ((f"probes.{name}", o, probe.split) for band in spec.bands.values() for o in band)


def _check_lengths(spec: Spec, path: str, operations: int, prompt: int, solution: int) -> Iterator[str]:
    """Whether one sampled document fits the model, and its solution what may be sampled; one token a word."""
    document = prompt + solution + 2
    what = f"a problem of {operations} operations has {prompt} prompt and {solution} solution tokens"
    if document > spec.model.max_length:
        yield f"{path}: {what}, {document} with begin and end, and model.max_length is {spec.model.max_length}."
    part, name, *_ = path.split(".")
    sampled = {"evaluation": spec.evaluation.max_new_tokens} if part == "bands" else {}
    for stage_name, stage in spec.stages.items():
        if part == "data" and isinstance(stage, Train) and stage.data == name and document > stage.row_length:
            row = stage.row_length
            yield f"stages.{stage_name}.row_length: {what}; a row of {row} cannot hold these, begin and end."
        if part == "stages" and isinstance(stage, RL) and stage_name == name:
            sampled[f"stages.{name}"] = stage.max_new_tokens
    for where, most in sampled.items():
        if solution >= most:
            yield f"{where}.max_new_tokens: {what}; {most} cannot hold solution and end."
        elif prompt + 1 + most > spec.model.max_length:
            yield f"{where}.max_new_tokens: {what}; prompt and {most} exceed model.max_length {spec.model.max_length}."
