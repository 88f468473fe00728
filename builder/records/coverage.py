"""Which decoders of transformers are proven, and how far: each type's small model through the whole contract.

One outcome per type, plain data: what is served, what is lacking and why, which laws held, and how many axes of its
tensors have a type.
The outcomes of a full run lie in ``site/coverage.json``, from which a page is made.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.records.process_limits import Limits, OutOfTime, Stopped, each, within

if TYPE_CHECKING:
    from explorer.contract.report import Report
    from explorer.model.language_model import LanguageModel
    from explorer.vocabulary.availability import Unavailability

Outcome = dict[str, Any]

DATA = Path("site/coverage.json")

#: What can come out, from best to worst, and what each means.
VERDICTS = {
    "proven": "every law held, and every value that its blocks have is served and was compared by one",
    "in part": "every law held; some values its blocks have are not served",
    "refused": "its forward goes a way that is not followed: nothing is served",
    "not built": "no small model could be built from its configuration class",
    "stopped": "its process ended before there was a result",
    "failed": "a law did not hold: something served is wrong",
}

#: Of a long list that many are said.
_SHOWN = 4

#: The libraries that an outcome depends on.
_LIBRARIES = ("transformers", "torch", "nnsight")

#: Seconds of processor time that a type's signature may take.
_FOR_TYPES = 90.0

#: What the forking server imports once. The model classes' common base is the slow part of the first of them.
_PRELOAD = ("explorer", "explorer.contract", "transformers.models.llama.modeling_llama")


def types() -> tuple[str, ...]:
    """Every decoder-only model type, by name."""
    from explorer.specimens import small

    return small.types()


def sweep(
    families: Sequence[str], jobs: int = 1, limits: Limits = Limits()
) -> Iterator[tuple[str, Outcome]]:
    """The outcome of each family, as they come in; ``jobs`` processes at a time."""
    for family, found in each(prove, families, jobs, limits, _PRELOAD):
        yield family, _bare("stopped", found.reason) if isinstance(found, Stopped) else found


def prove(family: str) -> Outcome:
    """Build a family's small model, load it, and hold it to the contract: one outcome, whatever happens."""
    from builder.records.collect import one_thread
    from explorer import load, specimens
    from explorer.checkpoints.load import NotTraceable
    from explorer.contract import check
    from explorer.errors import LoadError, first_sentence

    try:
        built = specimens.build(family)
    except Exception as error:  # whatever a configuration or a model class trips over
        return _bare("not built", f"{type(error).__name__}: {first_sentence(error)}")
    named = {"class": type(built.model).__name__, "weights": built.weights}
    with one_thread():  # a small model's tensors are too small to share out
        try:
            model = load(f"specimen:{family}")
        except LoadError as error:
            refused = _bare(
                "refused", error.reason if isinstance(error, NotTraceable) else str(error)
            )
            return named | refused | {"types": typed(built.model)}
        except Exception as error:  # a refusal is a sentence; anything else is a mistake of ours
            return named | _bare(
                "failed", f"it cannot be loaded: {type(error).__name__}: {first_sentence(error)}"
            )
        try:
            found = outcome(model, check(model, built.prompt))
        except Exception as error:  # the contract could not even be begun
            return named | _bare(
                "failed",
                f"the contract cannot be run: {type(error).__name__}: {first_sentence(error)}",
            )
        return named | found | {"types": typed(model)}


def typed(model: Any) -> dict[str, Any]:
    """How many axes of a model's tensors its signature resolves: ``{axes, resolved}``, or ``{unknown: reason}``.

    ``model``: loaded, or a transformers model of which no values are served.
    """
    from explorer.errors import first_sentence
    from explorer.signature import recorded

    try:
        with within(_FOR_TYPES):
            found = recorded(model)
    except OutOfTime as stopped:
        return {"unknown": str(stopped)}
    except (
        Exception
    ) as error:  # a reason is a sentence of its own; anything else is a mistake of ours, and said
        return {"unknown": f"{type(error).__name__}: {first_sentence(error)}"}
    return (
        found
        if "unknown" in found
        else {name: found["resolved"][name] for name in ("axes", "resolved")}
    )


def _bare(verdict: str, reason: str) -> Outcome:
    return {"verdict": verdict, "reason": reason}


def outcome(model: LanguageModel, report: Report) -> Outcome:
    """What a report and a model's support say: ``{verdict, served, lacking, unproven, laws, failed?}``.

    ``served``: values as ``host.name``. ``lacking``: ``{value, blocks, reason}`` of each that a block has and does not
    serve. ``unproven``: served values that no law has compared. ``failed``: the checks that did not hold.
    """
    from explorer.contract.report import verified

    rows = list(model.support())
    served = [f"{row.host}.{row.name}" for row in rows if row.available]
    held = verified(report.to_json()["checks"])
    unproven = [value for value in served if value not in held]
    lacking = [entry for row in rows for entry in lacks(f"{row.host}.{row.name}", row.reasons)]
    failed = [
        {
            "law": check.name,
            "host": check.host,
            "values": list(check.values),
            "detail": check.detail,
        }
        for check in report.failures
    ]
    verdict = "failed" if failed else "in part" if lacking or unproven else "proven"
    found = {
        "verdict": verdict,
        "blocks": model.num_layers,
        "served": served,
        "lacking": lacking,
        "unproven": unproven,
        "laws": {"passed": report.passed, "failed": report.failed},
    }
    return found | ({"failed": failed} if failed else {})


def lacks(value: str, reasons: Mapping[int | None, Unavailability]) -> list[dict[str, str]]:
    """What of a value is lacking, one entry per reason: on which blocks, and why. An absence by nature is no lack."""
    from explorer.contract.comparisons import blocks

    found = []
    for reason in dict.fromkeys(reasons.values()):
        if not reason.by_nature:
            layers = {
                layer for layer, said in reasons.items() if said == reason and layer is not None
            }
            found.append(
                {"value": value, "blocks": blocks(layers) if layers else "", "reason": str(reason)}
            )
    return found


# -- the committed data -----------------------------------------------------------


def data(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """What is kept of a full run: ``{versions, families}``, the same at every run of the same sources.

    Measured errors are left out: their last digits are a machine's own.
    """
    kept = {}
    for family in sorted(outcomes):
        found = dict(outcomes[family])
        if "failed" in found:
            found["failed"] = [
                {key: value for key, value in check.items() if key != "detail"}
                for check in found["failed"]
            ]
        kept[family] = found | {"file": own_lines(family)}
    return {"versions": {name: version(name) for name in _LIBRARIES}, "families": kept}


def own_lines(family: str) -> int:
    """Lines of the family's own file of sizes; 0 where the rules alone make its small model."""
    from explorer.specimens import recipes

    path = recipes.FOLDER / f"{family}.json"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0


def write(outcomes: Mapping[str, Outcome], path: Path = DATA) -> Path:
    """Write the data of a full run, one key a line, so that a change shows as one."""
    kept = data(outcomes)
    families = []
    for family, found in kept["families"].items():
        lines = [
            f"   {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in found.items()
        ]
        families.append(f"  {json.dumps(family)}: {{\n" + ",\n".join(lines) + "\n  }")
    text = (
        f'{{\n "versions": {json.dumps(kept["versions"])},\n "families": {{\n'
        + ",\n".join(families)
        + "\n }\n}\n"
    )
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path


def read(path: Path = DATA) -> dict[str, Any] | None:
    """The data of the last full run, None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# -- what is printed --------------------------------------------------------------


def comparisons(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many came out how, from best to worst; verdicts that did not come up left out."""
    counts = dict.fromkeys(VERDICTS, 0)
    for found in outcomes:
        counts[found["verdict"]] += 1
    return {verdict: count for verdict, count in counts.items() if count}


def said(found: Outcome) -> list[str]:
    """What there is to say of an outcome, shortest first: sentences without a full stop."""
    types = [f"types: {unknown}"] if (unknown := found.get("types", {}).get("unknown")) else []
    if "reason" in found:
        return [found["reason"], *types]
    lines = [f"{len(found['served'])} values, {found['laws']['passed']} checks held"]
    lines += _broken(found.get("failed", ()))
    lines += [f"no {names}: {reason}" for reason, names in by_reason(found["lacking"]).items()]
    if found["unproven"]:
        lines.append(f"compared by no law: {_some(found['unproven'])}")
    return lines + types


def share(outcomes: Iterable[Outcome]) -> float | None:
    """The share of axes that resolved in some outcomes, in percent, rounded down to a tenth; None where none is known."""
    found = [types for one in outcomes if "axes" in (types := one.get("types", {}))]
    axes = sum(one["axes"] for one in found)
    return 1000 * sum(one["resolved"] for one in found) // axes / 10 if axes else None


def resolved(outcomes: Mapping[str, Outcome]) -> str:
    """In a sentence, how much of the types is resolved: together, and of how many model types how much."""
    shares = [found for one in outcomes.values() if (found := share([one])) is not None]
    if not shares:
        return "None of them was asked for its signature."
    known = f"{len(shares)} of {len(outcomes)} model types have a signature, in which {share(outcomes.values()):g} % of all axes resolved"
    return f"{known}: every one in {shares.count(100)}, at least 98 % in {sum(one >= 98 for one in shares)}."


def _broken(failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """The laws that did not hold, those with one and the same detail together, the first few of each."""
    groups: dict[str, list[str]] = {}
    for check in failed:
        groups.setdefault(check.get("detail", "did not hold"), []).append(
            f"{check['law']} on {check['host']}"
        )
    lines = [f"{_some(laws)}: {detail}" for detail, laws in groups.items()]
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def by_reason(lacking: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Lacking values by the reason that they share, with the blocks where those are not all the same."""
    groups: dict[str, list[str]] = {}
    for entry in lacking:
        where = f" ({entry['blocks']})" if entry["blocks"] else ""
        groups.setdefault(entry["reason"], []).append(entry["value"] + where)
    return {reason: ", ".join(values) for reason, values in groups.items()}


def table(outcomes: Mapping[str, Outcome], width: int | None = None) -> str:
    """Every outcome, best first, with the share of its axes that resolved, in lines no longer than ``width``, and how many came out how."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    order = list(VERDICTS)
    names = max(len(name) for name in outcomes)
    verdicts = max(len(verdict) for verdict in order)
    indent = names + verdicts + 14
    lines = []
    for family, found in sorted(
        outcomes.items(), key=lambda item: (order.index(item[1]["verdict"]), item[0])
    ):
        wrapped = [
            part
            for line in said(found)
            for part in textwrap.wrap(line, max(40, width - indent)) or [""]
        ]
        lines.append(
            f"{family:<{names}}  {found['verdict']:<{verdicts}}  {percent(found):>8}  {wrapped[0]}".rstrip()
        )
        lines += [" " * indent + part for part in wrapped[1:]]
    counted = ", ".join(
        f"{count} {verdict}" for verdict, count in comparisons(outcomes.values()).items()
    )
    types = textwrap.wrap(resolved(outcomes), width, subsequent_indent="  ")
    return "\n".join([*lines, "", f"{len(outcomes)} decoders: {counted}", *types])


def percent(found: Outcome) -> str:
    """The share of an outcome's axes that resolved, as it is printed; nothing where it is not known."""
    part = share([found])
    return "" if part is None else f"{part:g} %"


# -- the page ---------------------------------------------------------------------


def page(kept: Mapping[str, Any], pages: Mapping[str, str]) -> str:
    """The coverage page as Markdown with HTML blocks.

    ``kept``: the data of a full run. ``pages``: title by model type, of the families that have a page.
    """
    from builder.pages.render import environment

    families = kept["families"]
    rows = [_row(family, found, pages) for family, found in families.items()]
    counts = comparisons(families.values())
    hosts = sorted({host for row in rows for host in row["hosts"]})
    return (
        environment()
        .get_template("coverage.md.jinja")
        .render(
            rows=rows,
            counts=counts,
            verdicts=VERDICTS,
            hosts=[(host, sum(host in row["hosts"] for row in rows)) for host in hosts],
            resolved=resolved(families),
            versions=kept["versions"],
            names=sorted({name.rpartition(".")[2] for row in rows for name in row["served"]}),
        )
    )


def _row(family: str, found: Outcome, pages: Mapping[str, str]) -> dict[str, Any]:
    served = found.get("served", [])
    return {
        "family": family,
        "class": found.get("class", ""),
        "verdict": found["verdict"],
        "served": served,
        "hosts": {name.rpartition(".")[0] for name in served} - {"model", "layers"},
        "said": said(found),
        "page": f"families/{family}/index.html" if family in pages else "",
        "file": found["file"],
        "types": percent(found),
    }
