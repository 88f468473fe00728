"""Signatures: the type of every tensor of a model, over the family's own sizes, inferred by running it at several sizes.

A family is built on the meta device with one size after another changed, then with all of them changed
at once. How an axis moves says which expression over the sizes it is; every probe has to agree, and what does
not resolve is given as its number and listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from explorer.accounting import counts as accounting
from explorer.errors import first_sentence, is_internal_error
from explorer.signature.block_kinds import block_list, counterparts, few_blocks
from explorer.signature.costs import Costs
from explorer.signature.describe import Described, by_rank
from explorer.signature.expressions import Expr
from explorer.signature.probes import BATCH, SEQ, Probes
from explorer.signature.running import PREFILL, Site, build, observe, parameters
from explorer.signature.sizes import depth_key, order, table
from explorer.signature.types import Type, Types
from explorer.signature.values import typed_values
from explorer.specimens.small import small_config
from explorer.specimens.small import types as types_of_decoders
from explorer.vocabulary.formatting import ranges

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

__all__ = ["NoSignature", "recorded", "signature"]

Json = dict[str, Any]


#: What was inferred of models, for others that differ in sizes alone.
Known = list[tuple[Probes, Types]]


class NoSignature(ValueError):
    """A model of which no signature can be had, with the reason."""


def recorded(model: LanguageModel, known: Known | None = None) -> Json:
    """The signature of a loaded model as records keep it: ``{unknown: reason}`` where there is none; ``known`` as `signature` has it."""
    try:
        return signature(model, known)
    except NoSignature as error:
        return {"unknown": str(error)}


def signature(model: LanguageModel | Any, known: Known | None = None) -> Json:
    """The signature of a loaded model, or of a transformers model on the meta device, as plain JSON-able data.

    ``{generics, axes, variables, dtype, entries, cache, blocks, values, costs, resolved}``; a type is ``{dims, numbers,
    dtype}`` with axes as text over the generics and with this model's numbers (text where the call decides). ``numbers``
    is None in a class that stands in the model with several sizes; an axis that did not resolve is "?" and its number.
    ``axes`` are all axes there are that are more than one name, each with what it comes to.

    known: what earlier calls inferred, to which this one adds. A model that differs from one of those in sizes alone is
    looked at a few times instead of being probed.

    Raises NoSignature where the class has no list of blocks, or does not run at any size tried.
    """
    module = getattr(model, "_module", model)
    try:
        blocks = block_list(module) if module is model else model.anatomy.backbone.blocks
        probes, typed, layers = _inferred(module, blocks, [] if known is None else known)
    except Exception as error:
        if is_internal_error(error):
            raise
        name = type(module).__name__
        raise NoSignature(
            f"{name} has no signature here: running it with other sizes failed with {first_sentence(error)}."
        ) from error
    sizes = {**probes.released, "Layers": len(module.get_submodule(blocks))}
    typed = _held(typed, module, blocks, layers, sizes)
    aliases = _aliases(typed, probes)

    axes: dict[str, int | str] = {}

    def write(one: Type) -> Json:
        written = one.json(sizes, aliases)
        axes.update(zip(written["dims"], written["numbers"], strict=True))
        return written

    few = probes.few()
    keeps = {layers_at: path for layers_at, path in _keepers(few).items()}
    described = Described(few, typed, write, blocks, layers, keeps)
    costs = Costs(module, few, typed, blocks, layers, sizes).json()
    whole, resolved = typed.counts
    unresolved = [
        {"at": ".".join(part for part in site if part), "axis": axis, "number": number}
        for site, axis, number in typed.unresolved
    ]
    classes, values = described.classes(), []
    if module is not model:
        try:
            values, lacking = typed_values(model, probes, typed, layers, write)
        except Exception as error:
            if is_internal_error(error):
                raise
            raise NoSignature(
                f"{type(module).__name__} has no signature here: reading its values failed with {first_sentence(error)}."
            ) from error
        unresolved += lacking
        whole += (more := sum(len(row["type"]["dims"]) for row in values))
        resolved += more - len(lacking)
        for one in classes:
            one["values"] = [
                {"name": row["name"], "type": row["type"]}
                for row in values
                if set(row["modules"]) & set(one["paths"])
            ]
    found = {
        "variables": table()["variables"],
        "dtype": str(module.dtype).removeprefix("torch."),
        "entries": described.entries(),
        "cache": described.cache(),
        "blocks": classes,
        "values": values,
        "costs": costs,
        "resolved": {
            "axes": whole,
            "resolved": resolved,
            "probes": len(probes.runs),
            "looks": probes.seen,
            "fixed": probes.stuck,
            "unresolved": unresolved,
        },
    }
    generics = _generics(probes, typed, sizes, aliases, module, costs["kinds"])
    simple = {row["name"] for row in generics} | set(table()["variables"])
    composed = {
        text: number
        for text, number in axes.items()
        if not (text in simple or text.isdigit() or text.startswith("?"))
    }
    return {"generics": generics, "axes": composed, **found}


def _inferred(module: Any, path: str, known: Known) -> tuple[Probes, Types, list[list[int]]]:
    """The probes of a model, the types they give, and for each of their blocks those of the model that are so.

    Where a model that differs in sizes alone was probed before, and its types hold in a few looks at this one, they are
    taken. A class whose forward looks at numbers is run small, with some. Raises whatever that one raises.
    """
    config, layers, count = few_blocks(module, path)
    cut = None if count is None else (path, count)
    for probes, types in known:
        if (again := types.elsewhere(probes, config, type(module), cut)) is not None:
            return again, types, layers
    try:
        probes = Probes(config, type(module), cut=cut)
    except Exception as error:
        kind = (
            module.config.model_type
            if module.config.model_type in types_of_decoders()
            else module.config.get_text_config().model_type
        )
        if kind not in types_of_decoders():
            raise
        small = small_config(kind)
        try:
            probes = Probes(small, type(module), released=module.config)
        except Exception:
            raise error from None
        return probes, Types.of(probes), counterparts(build(small, type(module)), module, path)
    types = Types.of(probes)
    known.append((probes, types))
    return probes, types, layers


def _held(
    typed: Types, module: Any, blocks: str, layers: list[list[int]], sizes: dict[str, int]
) -> Types:
    """The types, held to one run of the whole model on the meta device; to its parameters alone where it does not run there."""
    firsts = {layer: at for at in reversed(range(len(layers))) for layer in layers[at]}

    def alike(site: Site) -> Site | None:
        if site.what == "cache":
            return (
                site._replace(path=str(firsts[int(site.path)]))
                if site.path.isdigit() and int(site.path) in firsts
                else None
            )
        inner = site.path.removeprefix(f"{blocks}.")
        if inner == site.path:
            return site
        layer, _, rest = inner.partition(".")
        return (
            site._replace(path=f"{blocks}.{firsts[int(layer)]}.{rest}".rstrip("."))
            if int(layer) in firsts
            else None
        )

    whole = build(module.config, type(module))
    try:
        seen = observe(whole, BATCH, SEQ)
    except Exception:
        seen = parameters(whole)
    return typed.held_to(seen, {**sizes, "B": BATCH, "S": SEQ, "Past": SEQ}, alike, len(layers))


def _keepers(module: Any) -> dict[int, str]:
    """By block, the module that writes to the cache; nothing where a run does not show it."""
    try:
        return {owner.layer: owner.path for owner in accounting.run(module).owners}
    except Exception:
        return {}


def _aliases(types: Types, probes: Probes) -> dict[Expr, str]:
    """Names for expressions that are sizes in their own right: what the convolution reads, and a head's width that no figure gives."""
    found: dict[Expr, str] = {}
    taken = set(probes.names.values())
    for site, one in types.found.items():
        if site.call != PREFILL or site.what != "cache" or len(one.axes) < 3:
            continue
        convolved = site.name.startswith("conv_states")
        axis, name = (
            (one.axes[1], "Conv")
            if convolved
            else (one.axes[-1], "HeadDim")
            if site.name == "keys"
            else (None, "")
        )
        if (
            isinstance(axis, Expr)
            and len(axis.names) > 1
            and axis.cap is None
            and name not in (*taken, *found.values())
        ):
            found[axis] = name
    return found


def _generics(
    probes: Probes,
    types: Types,
    sizes: dict[str, int],
    aliases: dict[Expr, str],
    module: Any,
    kinds: list[Json],
) -> list[Json]:
    """The sizes that types are written in, with their numbers and where each comes from."""
    expressions = [
        axis for one in types.found.values() for axis in one.axes if isinstance(axis, Expr)
    ]
    used = {name for axis in expressions for name in axis.names} - set(table()["variables"])
    used |= {name for size in types.rounded.values() for name in (size.of, size.to)}
    used |= {
        name
        for follows in (*aliases, *(probes.follows[name] for name in used & probes.follows.keys()))
        for name in follows.names
    }
    longest = {name for name in sizes if name == "MaxSeq"}
    rows = {}
    for name in used | longest | {"Layers"}:
        if name in types.rounded:
            rows[name] = {
                "name": name,
                "number": sizes[name],
                "source": "",
                "formula": str(types.rounded[name]),
            }
            continue
        source = ".".join(
            (depth_key(module.config) or ()) if name == "Layers" else probes.keys[name]
        )
        rows[name] = {"name": name, "number": sizes[name], "source": source}
        if name in probes.follows:
            rows[name]["formula"] = probes.follows[name].text(order())
    for kind in kinds:
        rows[kind["name"]] = {
            "name": kind["name"],
            "number": kind["number"],
            "source": f"blocks {ranges(kind['layers'])}",
        }
    for expression, name in aliases.items():
        rows[name] = {
            "name": name,
            "number": int(expression.value(sizes)),
            "source": "",
            "formula": expression.text(order()),
        }
    return [rows[name] for name in by_rank(list(rows))]
