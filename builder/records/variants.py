"""Variants: run the contract on each family's small model with one field of its configuration
moved, for every move that changes the graph of operations, and store the outcomes as data.

What to try is proposed by `explorer.specimens.variants`. A configuration or a model that
transformers does not build or run is no variant; nor is one whose graph another one has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Required, TypedDict

from builder.records import coverage
from builder.records.cache import ResultCache, variants_key
from builder.records.process_limits import Limits, NoResult, run_each
from builder.records.threads import one_thread
from builder.time_limit import OutOfTime, processor_time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: As of `explorer.specimens.variants`, which imports transformers.
Change = dict[str, Any]

DATA = Path("site/coverage_variants.json")

#: A type has many small models, each of which takes a second or two.
LIMITS = Limits(seconds=2400.0)

#: Seconds of processor time that one variant may take.
_VARIANT_SECONDS = 60.0


class Variant(TypedDict, total=False):
    """The outcome of the contract on one variant; fields as of `coverage.Outcome`."""

    change: Required[Change]
    verdict: Required[str]
    reason: str
    lacking: list[coverage.Lack]
    unproven: list[str]
    failed: list[coverage.FailedCheck]


class FamilyVariants(TypedDict):
    """What came out for one model type.

    tried: how many changes were tried. rejected: how many of them transformers does not build or
    run. same: how many have the graph of the specimen or of an earlier change. stopped: why there
    is no result.
    """

    tried: int
    rejected: int
    same: int
    variants: list[Variant]
    stopped: NotRequired[str]


class VariantsData(TypedDict):
    versions: dict[str, str]
    families: dict[str, FamilyVariants]


# -- the sweep --------------------------------------------------------------------


def sweep(
    families: Sequence[str], jobs: int = 1, fresh: bool = False, limits: Limits = LIMITS
) -> Iterator[tuple[str, FamilyVariants]]:
    """Yield the outcomes of each family as they finish, ``jobs`` processes at a time.

    Families whose outcomes are kept from an interrupted run of the same sources come first, unless
    ``fresh``.
    """
    kept = ResultCache(fresh)
    keys = {family: variants_key(family) for family in families}
    missing = []
    for family in families:
        if (found := kept.get("variants", family, keys[family])) is None:
            missing.append(family)
        else:
            yield family, found
    for family, found in run_each(family_variants, missing, jobs, limits, coverage.PRELOAD):
        if isinstance(found, NoResult):
            yield family, _none(found.reason)
        else:
            yield family, kept.store("variants", family, keys[family], found)


def _none(reason: str) -> FamilyVariants:
    return {"tried": 0, "rejected": 0, "same": 0, "variants": [], "stopped": reason}


def family_variants(family: str) -> FamilyVariants:
    """Try every change of a family's specimen and run the contract on each variant."""
    from explorer.specimens import variants

    with one_thread():
        tried = variants.changes(family)
        rejected, kept = distinct(family, tried)
        outcomes = [variant_outcome(family, change) for change in kept]
    return {
        "tried": len(tried),
        "rejected": rejected,
        "same": len(tried) - rejected - len(kept),
        "variants": outcomes,
    }


def distinct(family: str, tried: Sequence[Change]) -> tuple[int, list[Change]]:
    """Return how many changes transformers rejects, and those of the others that give a graph which
    neither the specimen nor an earlier change has.
    """
    from explorer import specimens
    from explorer.specimens import variants

    config = specimens.config_of(family)
    before = config.to_dict()
    read, seen = fields_read(config), {_graph_of(family, {})}
    rejected, kept = 0, []
    for change in tried:
        try:
            after = variants.configuration(family, change).to_dict()
            moved = {name for name in before | after if before.get(name) != after.get(name)}
            found = _graph_of(family, change) if moved & read else None
        except Exception:  # whatever a configuration or a model class fails on
            rejected += 1
            continue
        if found is not None and found not in seen:
            seen.add(found)
            kept.append(change)
    return rejected, kept


def fields_read(config: PreTrainedConfig) -> set[str]:
    """Return which fields of a configuration and its parts its model reads, built and run.

    A change of others changes no graph. For a process that does nothing else meanwhile.
    """
    from transformers import PreTrainedConfig

    from explorer.discovery.record_run import record_run
    from explorer.specimens import building

    read: set[str] = set()
    original = PreTrainedConfig.__getattribute__

    def noting(of: PreTrainedConfig, name: str) -> Any:
        read.add(original(of, "attribute_map").get(name, name))
        return original(of, name)

    PreTrainedConfig.__getattribute__ = noting  # pyright: ignore[reportAttributeAccessIssue]  any class takes one
    try:
        model = building.empty(config)
        with suppress(Exception):  # one that stops while it is recorded has read nearly all
            record_run(model, step=False)
    finally:
        PreTrainedConfig.__getattribute__ = original
    return read


def _graph_of(family: str, change: Change) -> str:
    """Return the graph of a variant up to sizes.

    A small model runs faster with numbers than on the meta device. One that runs, but not while it
    is recorded, has a graph of its own. Raises where it does not run or returns no finite logits.
    """
    from explorer.discovery.record_run import record_run
    from explorer.specimens import variants
    from explorer.specimens.graph_shape import graph_shape

    built = variants.build(family, change)
    try:
        run = record_run(built.model, step=False)
    except Exception:
        output = built.model(built.tokenizer(built.prompt, return_tensors="pt")["input_ids"])
        graph = json.dumps(change)
    else:
        output, graph = run.prompt.output, graph_shape(run)
    if not output.logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return graph


def variant_outcome(family: str, change: Change) -> Variant:
    """Run the contract on one variant, in float32 alone."""
    from explorer.checkpoints.load import load_specimen
    from explorer.specimens import variants

    built = variants.build(family, change)
    try:
        with processor_time_limit(_VARIANT_SECONDS):
            found, _ = coverage.loaded_outcome(lambda: load_specimen(built), built.prompt)
    except OutOfTime as error:
        return {"change": change, "verdict": "stopped", "reason": str(error)}
    outcome: Variant = {"change": change, "verdict": found["verdict"]}
    if "reason" in found:
        outcome["reason"] = found["reason"]
    if lacking := found.get("lacking"):
        outcome["lacking"] = lacking
    if unproven := found.get("unproven"):
        outcome["unproven"] = unproven
    if failed := found.get("failed"):
        outcome["failed"] = failed
    return outcome


# -- the committed data -----------------------------------------------------------


def data(found: Mapping[str, FamilyVariants]) -> VariantsData:
    """Return what is committed, the same at every run of the same sources."""
    versions = {name: version(name) for name in coverage.PACKAGES}
    families = {family: _without_details(found[family]) for family in sorted(found)}
    return {"versions": versions, "families": families}


def _without_details(found: FamilyVariants) -> FamilyVariants:
    variants: list[Variant] = []
    for one in found["variants"]:
        failed = one.get("failed", [])
        without = [coverage.without_detail(check) for check in failed]
        variants.append({**one, "failed": without} if failed else one)
    return {**found, "variants": variants}


def write(found: Mapping[str, FamilyVariants], path: Path = DATA, merge: bool = False) -> Path:
    """Write outcomes, one variant a line; ``merge``: beside those of other families, where those
    are of the same versions.
    """
    new = data(found)
    old = read(path) if merge else None
    if old is not None and old["versions"] == new["versions"]:
        families = old["families"] | new["families"]
        new["families"] = {family: families[family] for family in sorted(families)}
    rows = ",\n".join(
        f"  {json.dumps(family)}: {_lines(one)}" for family, one in new["families"].items()
    )
    text = f'{{\n "versions": {json.dumps(new["versions"])},\n "families": {{\n{rows}\n }}\n}}\n'
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path


def _lines(found: FamilyVariants) -> str:
    variants = ",\n".join(f"    {json.dumps(one, ensure_ascii=False)}" for one in found["variants"])
    rest = {name: value for name, value in found.items() if name != "variants"}
    head = json.dumps(rest, ensure_ascii=False)[:-1]
    return f'{head}, "variants": [\n{variants}\n  ]}}' if variants else f'{head}, "variants": []}}'


def read(path: Path = DATA) -> VariantsData | None:
    """Return the data of the last run, None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
