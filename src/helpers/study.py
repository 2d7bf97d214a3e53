"""A study: many runs from one YAML file, planned and checked before anything starts, then scheduled by Snakemake.

    name: micro
    title: The micro study
    seeds: [0]                       # optional; with several, names get -seed{n}
    models: {small: base-xs}         # optional: what a name in `parent` and `teacher` stands for, so that another model is one edit
    smoke: {grpo: {steps: 2}}        # optional: parameters of each stage in the smoke variant (see `variant`)
    runs:
      - name: rtn-{size}-{bits}bit   # `{...}` is filled in from the matrix, here and in the values below
        stage: ptq
        matrix: {size: [xs, s], bits: [8, 4]}
        parent: grpo-{size}          # a run of this study, or whatever `lowbit run -p parent=` takes
        params: {bits: "{bits}"}
      - name: eval-{parent}          # a list of parents makes one run each; * matches names of earlier runs
        stage: eval
        parent: [base-s, "rtn-*"]
      - name: pareto
        stage: pareto
        parents: ["eval-*"]          # all of them together

`plan` gives the jobs with their run ids, which are known before anything runs, because an id hashes what a run is made
from. `schedule.run_study` runs what is missing.
"""

import fnmatch
import itertools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helpers import params, project, runs
from helpers.errors import UserError
from helpers.identity import SINGLE, code_version, run_id

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
RESERVED = {"local"}


class StudyError(UserError):
    """A study file is not right, or the study cannot be run."""


class Entry(BaseModel):
    """One item of `runs`."""

    model_config = ConfigDict(extra="forbid")
    name: str
    stage: str
    matrix: dict[str, Annotated[list[str | int | float | bool], Field(min_length=1)]] = {}
    parent: str | Annotated[list[str], Field(min_length=1)] | None = None
    parents: list[str] = []
    params: dict[str, Any] = {}


class Study(BaseModel):
    """A study file."""

    model_config = ConfigDict(extra="forbid")
    name: str
    title: str = ""
    runs: list[Entry]
    seeds: list[int] = [0]
    models: dict[str, str] = {}
    smoke: dict[str, dict[str, Any]] = {}
    pages: list[str] = [
        "*"
    ]  # which runs the book shows as pages, when they are published; of the others, their records

    def has_page(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.pages)


@dataclass(frozen=True)
class Job:
    """One planned run; `parents` are the names of the jobs that it needs, `path` is where it lies or will lie."""

    name: str
    stage: str
    parameters: dict[str, Any]
    parents: list[str]
    run_id: str
    path: Path


@dataclass(frozen=True)
class _Draft:
    """A run before its parents are resolved; `base` is its name without the seed."""

    base: str
    name: str
    seed: int | None
    stage: str
    given: dict[str, Any]
    refs: list[str] = field(default_factory=list)  # of `parents`, beside given["parent"]


class _Once(yaml.SafeLoader):
    """YAML in which a key may stand only once; the standard loader lets the last one win in silence."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load(study: str | Path) -> Study:
    """Read a study by name, or from a file."""
    known = project.studies()
    path = known.get(str(study), Path(study))
    if not path.is_file():
        choice = f"{project.did_you_mean(str(study), known)} choose one of {', '.join(known)}" if known else ""
        raise StudyError(f"{study} is neither a study nor a file{choice}.")
    try:
        found = Study.model_validate(yaml.load(path.read_text(), Loader=_Once))
    except yaml.YAMLError as error:
        where = f" in line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        raise StudyError(f"{path.name} is not valid YAML{where}: {getattr(error, 'problem', None) or error}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        told = first["msg"]
        if first["type"] == "extra_forbidden":  # loc: runs, number, key; or key
            known = (Entry if len(first["loc"]) > 1 else Study).model_fields
            told = f"that key is unknown{project.did_you_mean(str(first['loc'][-1]), known)} choose one of {', '.join(known)}"
        raise StudyError(f"{path.name} is not a study: {where}: {told}.") from None
    if not NAME.fullmatch(found.name) or found.name in RESERVED:
        raise StudyError(
            f"{path.name}: the name {found.name!r} is not allowed: use letters, digits, . _ -, and not local."
        )
    if path in known.values() and found.name != path.stem:
        raise StudyError(f"{path.name}: its name is {found.name!r}, and must be that of the file, {path.stem!r}.")
    if not found.runs or not found.seeds or len(set(found.seeds)) < len(found.seeds):
        raise StudyError(f"{path.name}: runs and seeds need at least one item each, and a seed only once.")
    if odd := next((stage for stage in found.smoke if stage not in {entry.stage for entry in found.runs}), None):
        raise StudyError(f"{path.name}: smoke has {odd}, and no run of the study is of that stage.")
    return found


def variant(study: Study, models: dict[str, str], suffix: str = "smoke") -> Study:
    """The same runs with other `models` and with the parameters of `smoke`: quick, and no line of the study left out.

    Errors: `StudyError` for a study without `smoke`.
    """
    if not study.smoke:
        raise StudyError(f"Study {study.name} has no smoke variant: its file says nothing under `smoke`.")
    entries = [
        entry.model_copy(update={"params": entry.params | study.smoke.get(entry.stage, {})}) for entry in study.runs
    ]
    return study.model_copy(update={"name": f"{study.name}-{suffix}", "models": models, "runs": entries, "pages": []})


def plan(study: Study | str | Path) -> list[Job]:
    """The jobs of a study, in the order of its file."""
    study = study if isinstance(study, Study) else load(study)
    drafts: list[_Draft] = []
    declared: dict[str, dict[str, params.Param]] = {}
    for entry in study.runs:
        if entry.stage not in declared:
            declared[entry.stage] = params.template(_template(study, entry.stage))
        drafts += _expand(study, entry, declared[entry.stage], drafts)
    names = [draft.name for draft in drafts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StudyError(f"Study {study.name} has two runs called {twice}: put what differs into the name.")
    if both := next((name for name in names if name in study.models), None):
        raise StudyError(f"Study {study.name} calls both a model and a run {both}: give one of them another name.")
    codes = {stage: code_version(project.template(stage)) for stage in declared}
    jobs: dict[str, Job] = {}
    externals: dict[str, runs.RunRef] = {}
    for draft in _ordered(study, drafts):
        try:
            jobs[draft.name] = _job(study, draft, declared[draft.stage], codes[draft.stage], jobs, externals)
        except UserError as error:
            raise StudyError(f"Study {study.name}, run {draft.name}: {error}") from None
    return [jobs[name] for name in sorted(jobs, key=names.index)]


def _template(study: Study, stage: str) -> Path:
    try:
        return project.template(stage)
    except UserError as error:
        raise StudyError(f"Study {study.name}: {error}") from None


def _expand(study: Study, entry: Entry, declared: dict[str, params.Param], earlier: list[_Draft]) -> list[_Draft]:
    """The runs of one entry: matrix, then seeds, then a list of parents."""
    sown = "seed" in declared and "seed" not in entry.params and "seed" not in entry.matrix
    found = []
    for values in itertools.product(*entry.matrix.values()):
        cell = dict(zip(entry.matrix, values, strict=True))
        for seed in study.seeds if sown else [None]:
            fill = _filler(study, entry, cell)
            listed = isinstance(entry.parent, list)
            written = entry.parent if listed else [entry.parent or ""]
            parents = _matching(study, entry, [fill(ref) for ref in written], seed, earlier) if entry.parent else [""]
            for parent in parents:
                fill = _filler(study, entry, {**cell, "parent": parent.rpartition("/")[2]} if parent else cell)
                given = {key: fill(value) for key, value in entry.params.items()}
                if "seed" in entry.matrix and "seed" in declared:
                    given.setdefault("seed", cell["seed"])
                given |= {"parent": parent} if parent else {}
                given |= {"seed": seed} if seed is not None else {}
                base = fill(entry.name)
                name = f"{base}-seed{seed}" if seed is not None and len(study.seeds) > 1 else base
                if not NAME.fullmatch(name):
                    raise StudyError(
                        f"Study {study.name}: the run name {name!r} is not allowed: use letters, digits, . _ -"
                    )
                refs = _matching(study, entry, [fill(ref) for ref in entry.parents], seed, earlier)
                found.append(_Draft(base, name, seed, entry.stage, given, refs))
    return found


def _filler(study: Study, entry: Entry, cell: dict[str, Any]):
    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, str):
            return value
        try:
            return value.format(**cell)
        except (KeyError, IndexError, ValueError, AttributeError):
            where = f"Study {study.name}, run {entry.name}"
            names = ", ".join(f"{{{name}}}" for name in cell) or "nothing"
            raise StudyError(f"{where}: {value!r} cannot be filled in from its matrix, which has {names}.") from None

    return fill


def _matching(study: Study, entry: Entry, refs: list[str], seed: int | None, earlier: list[_Draft]) -> list[str]:
    """Replace patterns by names: base names for a run with a seed, which follows its own seed; else full names."""
    names: list[str] = []
    near = [draft for draft in earlier if seed is None or draft.seed in (seed, None)]
    for ref in refs:
        matches = [draft for draft in near if fnmatch.fnmatchcase(draft.base, ref)]
        if set("*?[") & set(ref) and not matches:
            raise StudyError(f"Study {study.name}, run {entry.name}: no earlier run is called {ref}.")
        names += [draft.name if seed is None else draft.base for draft in matches] or [ref]
    return list(dict.fromkeys(names))


def _ordered(study: Study, drafts: list[_Draft]) -> list[_Draft]:
    """Drafts with their references turned into full names, parents first."""
    names = {draft.name for draft in drafts}

    def full(ref: str, draft: _Draft) -> str:
        sown = f"{ref}-seed{draft.seed}"
        return sown if draft.seed is not None and sown in names else ref

    waiting = {}
    for draft in drafts:
        given = draft.given | {name: full(draft.given[name], draft) for name in SINGLE if draft.given.get(name)}
        waiting[draft.name] = replace(draft, given=given, refs=[full(ref, draft) for ref in draft.refs])
    ordered: list[_Draft] = []
    while waiting:
        ready = [d for d in waiting.values() if not set(waiting) & {*(d.given.get(name) for name in SINGLE), *d.refs}]
        if not ready:
            raise StudyError(f"Study {study.name}: these runs wait for each other: {', '.join(waiting)}.")
        ordered += ready
        for draft in ready:
            del waiting[draft.name]
    return ordered


def _job(study: Study, draft: _Draft, declared, code: str, jobs: dict[str, Job], externals: dict) -> Job:
    """Resolve the parents of a draft, check its parameters, and give it its id."""
    needs: list[str] = []
    parents: list[str] = []

    def resolve(ref: str, what: str = "parent") -> str:
        if ref in jobs:
            needs.append(ref)
            parents.append(jobs[ref].run_id)
            return jobs[ref].run_id
        ref = study.models.get(ref, ref)
        externals[ref] = externals.get(ref) or runs.load_parent(ref, what)
        parents.append(externals[ref].id)
        return externals[ref].ref

    given = draft.given | ({"parents": draft.refs} if draft.refs else {})
    given = params.validate(declared, given, draft.stage)
    for name in SINGLE:
        if given.get(name):
            given[name] = resolve(given[name], name)
    if given.get("parents"):
        refs = [match for ref in given["parents"] for match in ([ref] if ref in jobs else runs.expand(ref))]
        given["parents"] = [resolve(ref) for ref in refs]
    identifier = run_id(draft.stage, given, parents, code)
    path = runs.done(identifier) or project.runs_dir() / study.name / draft.stage / identifier
    return Job(draft.name, draft.stage, given, needs, identifier, path)
