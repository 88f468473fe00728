"""Coverage: run the contract on the small model of every decoder of transformers, and store the
outcomes as data.

An outcome says what is served, what is lacking and why, which checks passed, and how many axes of
the tensors have a type. The outcomes of a full run are in ``site/coverage.json``, from which a page
is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Required, TypedDict

from builder.records.process_limits import DEFAULT_LIMITS, Limits, NoResult, run_each
from builder.records.threads import one_thread
from builder.time_limit import OutOfTime, processor_time_limit

if TYPE_CHECKING:
    from explorer.contract.report import Report
    from explorer.model.language_model import LanguageModel
    from explorer.specimens import Specimen
    from explorer.vocabulary.availability import Unavailability

DATA = Path("site/coverage.json")

#: The verdicts from best to worst, and what each means.
VERDICTS = {
    "proven": "every check passed, and every value its blocks have is served and verified",
    "in part": "every check passed; some values that its blocks have are not served",
    "refused": "its forward pass cannot be traced: nothing is served",
    "not built": "no small model could be built from its configuration class",
    "stopped": "its process ended before there was a result",
    "failed": "a check failed: something that is served is wrong",
}

#: The packages that an outcome depends on.
PACKAGES = ("transformers", "torch", "nnsight")

#: Seconds of processor time that a type's signature may take.
_SIGNATURE_SECONDS = 90.0

#: What the forking server imports once. The base of the model classes is the slow part of the first
#: of them.
PRELOAD = ("explorer", "explorer.contract", "transformers.models.llama.modeling_llama")


class Lack(TypedDict):
    """A value that some blocks have and do not serve; ``blocks`` is "" where all of them or none
    in particular.
    """

    value: str
    blocks: str
    reason: str


class FailedCheck(TypedDict):
    name: str
    host: str
    values: list[str]
    detail: NotRequired[str]


class Counts(TypedDict):
    passed: int
    failed: int
    not_applicable: NotRequired[int]


class Axes(TypedDict):
    """How many axes of a model's tensors there are, and how many of them the signature resolves."""

    axes: int
    resolved: int


class NoTypes(TypedDict):
    """Why there is no signature."""

    unknown: str


#: What came out for one model type; only ``verdict`` is always there. reason: of a verdict without
#: a report. served: values as ``host.name``. unproven: served values that no check has verified.
#: file: lines of its own recipe.
Outcome = TypedDict(
    "Outcome",
    {
        "class": str,
        "weights": str,
        "verdict": Required[str],
        "reason": str,
        "blocks": int,
        "served": list[str],
        "lacking": list[Lack],
        "unproven": list[str],
        "checks": Counts,
        "failed": list[FailedCheck],
        "types": Axes | NoTypes,
        "file": int,
    },
    total=False,
)


class CoverageData(TypedDict):
    versions: dict[str, str]
    families: dict[str, Outcome]


def types() -> tuple[str, ...]:
    """Return every decoder-only model type, by name."""
    from explorer.specimens import small

    return small.types()


def sweep(
    families: Sequence[str], jobs: int = 1, limits: Limits = DEFAULT_LIMITS
) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each family as they finish, ``jobs`` processes at a time."""
    for family, found in run_each(family_outcome, families, jobs, limits, PRELOAD):
        yield (
            family,
            _without_report("stopped", found.reason) if isinstance(found, NoResult) else found,
        )


def family_outcome(family: str) -> Outcome:
    """Build a family's small model, load it and run the contract; return an outcome in any case."""
    from explorer import specimens

    try:
        built = specimens.build(family)
    except Exception as error:  # whatever a configuration or a model class fails on
        return _without_report("not built", _error_words(error))
    with one_thread():
        found = _built_outcome(family, built)
    return {"class": type(built.model).__name__, "weights": built.weights, **found}


def _built_outcome(family: str, built: Specimen) -> Outcome:
    """Load a family's small model and run the contract on it."""
    from explorer import load

    found, model = loaded_outcome(lambda: load(f"specimen:{family}"), built.prompt)
    if model is None and found["verdict"] == "failed":
        return found
    return {**found, "types": count_axes(built.model if model is None else model)}


def loaded_outcome(
    load: Callable[[], LanguageModel], prompt: str
) -> tuple[Outcome, LanguageModel | None]:
    """Load a small model and run the contract on it; return the outcome and, where there is a
    report, the model.
    """
    from explorer.checkpoints.load import NotTraceable
    from explorer.contract import check
    from explorer.errors import LoadError

    try:
        model = load()
    except LoadError as error:
        reason = error.reason if isinstance(error, NotTraceable) else str(error)
        return _without_report("refused", reason), None
    except Exception as error:  # not a refusal with a reason, so a mistake of ours
        return _without_report("failed", f"it cannot be loaded: {_error_words(error)}"), None
    try:
        return outcome(model, check(model, prompt)), model
    except Exception as error:  # the contract could not even begin
        return _without_report("failed", f"the contract cannot be run: {_error_words(error)}"), None


def _error_words(error: Exception) -> str:
    from explorer.errors import first_sentence

    return f"{type(error).__name__}: {first_sentence(error)}"


def count_axes(model: Any) -> Axes | NoTypes:
    """Count the axes of a model's tensors and those its signature resolves, or say why there is no
    signature.

    ``model``: loaded, or a transformers model of which no values are served.
    """
    from explorer.signature import recorded

    try:
        with processor_time_limit(_SIGNATURE_SECONDS):
            found = recorded(model)
    except OutOfTime as error:
        return {"unknown": str(error)}
    except Exception as error:  # not a reason but a mistake of ours, and reported as such
        return {"unknown": _error_words(error)}
    if "unknown" in found:
        return {"unknown": found["unknown"]}
    return {"axes": found["resolved"]["axes"], "resolved": found["resolved"]["resolved"]}


def _without_report(verdict: str, reason: str) -> Outcome:
    return {"verdict": verdict, "reason": reason}


def outcome(model: LanguageModel, report: Report) -> Outcome:
    """Return the outcome of a model from its support and the contract's report on it."""
    from explorer.contract.report import verified

    rows = list(model.support())
    served = [f"{row.host}.{row.name}" for row in rows if row.available]
    checked = verified(report.to_json()["checks"])
    unproven = [value for value in served if value not in checked]
    lacking = [lack for row in rows for lack in lacks(f"{row.host}.{row.name}", row.reasons)]
    verdict = "failed" if report.failures else "in part" if lacking or unproven else "proven"
    found: Outcome = {
        "verdict": verdict,
        "blocks": model.num_layers,
        "served": served,
        "lacking": lacking,
        "unproven": unproven,
        "checks": {
            "passed": report.passed,
            "failed": report.failed,
            "not_applicable": len(report.not_applicable),
        },
    }
    if report.failures:
        found["failed"] = [
            {
                "name": check.name,
                "host": check.host,
                "values": list(check.values),
                "detail": check.detail,
            }
            for check in report.failures
        ]
    return found


def lacks(value: str, reasons: Mapping[int | None, Unavailability]) -> list[Lack]:
    """Return why a value is missing, one entry per reason; a value that a block has not by its
    nature is no lack.
    """
    from explorer.contract.comparisons import blocks

    found: list[Lack] = []
    for reason in dict.fromkeys(reasons.values()):
        if not reason.by_nature:
            layers = {
                layer for layer, other in reasons.items() if other == reason and layer is not None
            }
            where = blocks(layers) if layers else ""
            found.append({"value": value, "blocks": where, "reason": str(reason)})
    return found


# -- the committed data -----------------------------------------------------------


def data(outcomes: Mapping[str, Outcome]) -> CoverageData:
    """Return what is committed of a full run, the same at every run of the same sources.

    Measured errors are left out, since their last digits depend on the machine.
    """
    families: dict[str, Outcome] = {}
    for family in sorted(outcomes):
        families[family] = {**outcomes[family], "file": own_lines(family)}
        if failed := families[family].get("failed"):
            families[family]["failed"] = [without_detail(check) for check in failed]
    return {"versions": {name: version(name) for name in PACKAGES}, "families": families}


def without_detail(check: FailedCheck) -> FailedCheck:
    """Return a failed check without what was measured."""
    return {"name": check["name"], "host": check["host"], "values": check["values"]}


def own_lines(family: str) -> int:
    """Return the number of lines of the family's own recipe; 0 where the rules alone make its
    small model.
    """
    from explorer.specimens import recipes

    path = recipes.FOLDER / f"{family}.json"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0


def write(outcomes: Mapping[str, Outcome], path: Path = DATA) -> Path:
    """Write the data of a full run, one key a line, so that a change can be read."""
    found = data(outcomes)
    families = []
    for family, one in found["families"].items():
        lines = [
            f"   {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in one.items()
        ]
        families.append(f"  {json.dumps(family)}: {{\n" + ",\n".join(lines) + "\n  }")
    versions, rows = json.dumps(found["versions"]), ",\n".join(families)
    part = path.with_suffix(".part")
    part.write_text(
        f'{{\n "versions": {versions},\n "families": {{\n{rows}\n }}\n}}\n', encoding="utf-8"
    )
    part.replace(path)
    return path


def read(path: Path = DATA) -> CoverageData | None:
    """Return the data of the last full run, None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
