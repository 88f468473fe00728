"""The signature of a model: inferring the types of its tensors, checking them on the whole model,
and writing them down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from explorer.accounting import counts as accounting
from explorer.discovery.record_run import recorded_run
from explorer.discovery.recorded_run import RecordedRun
from explorer.errors import first_sentence, is_internal_error
from explorer.signature.block_kinds import block_list, counterparts, few_blocks
from explorer.signature.costs import Costs
from explorer.signature.describe import Description, by_rank
from explorer.signature.expressions import Expr
from explorer.signature.observation import (
    PREFILL,
    TensorSite,
    build,
    of_parameters,
    of_recorded_run,
)
from explorer.signature.probes import OTHER_BATCHES, OTHER_SEQS, Probes
from explorer.signature.probing import probe
from explorer.signature.resizable import ResizableModel
from explorer.signature.sizes import depth_key, order, table
from explorer.signature.types import Type, Types
from explorer.signature.values import ProbedHosts, typed_values
from explorer.specimens.small import small_config
from explorer.specimens.small import types as decoder_types
from explorer.vocabulary.formatting import ranges

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

Json = dict[str, Any]


class NoSignature(ValueError):
    """A model of which no signature can be had, with the reason."""


@dataclass
class InferredTypes:
    """What was inferred of a model, for others of its class that differ in sizes alone."""

    probes: Probes
    types: Types
    hosts: ProbedHosts = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = ProbedHosts(self.probes)

    def hold_for(self, asked: ResizableModel) -> bool:
        """Whether one run of few blocks of another model, with narrow windows, has these types."""
        model = self.probes.model
        if asked is model:
            return True
        if not asked.has_same_sizes(model):
            return False
        sizes = asked.released
        for name, rounded in self.types.rounded.items():
            sizes[name] = rounded.value(sizes)
        if any(
            expression.value(sizes) != sizes[name]
            for name, expression in self.probes.dependent.items()
        ):
            return False
        batch, seq = OTHER_BATCHES[0], OTHER_SEQS[0]
        call = {"B": batch, "S": seq, "Past": seq}
        try:
            observation = asked.observe({}, batch, seq)
        except Exception:  # a forward may raise anything
            return False
        return self.types.hold(observation, {**sizes, **asked.numbers, **call})


#: What was inferred of the models seen so far.
Known = list[InferredTypes]


def recorded(model: LanguageModel, known: Known | None = None) -> Json:
    """The signature of a loaded model as records keep it: ``{unknown: reason}`` where there is
    none.

    known: as for `signature`.
    """
    try:
        return signature(model, known)
    except NoSignature as error:
        return {"unknown": str(error)}


def signature(model: LanguageModel | Any, known: Known | None = None) -> Json:
    """The signature of a loaded model, or of a transformers model on the meta device, as plain
    JSON-able data.

    ``{generics, axes, variables, dtype, entries, cache, blocks, values, costs, resolved}``; a type
    is ``{dims, numbers, dtype}`` with axes as text over the generics and with this model's numbers
    (text where the call decides). ``numbers`` is None in a class that stands in the model with
    several sizes; an axis that did not resolve is "?" and its number. ``axes`` are all axes there
    are that are more than one name, each with its number.

    known: what earlier calls inferred, to which this one adds. A model that differs from one of
    those in sizes alone is run once with few blocks instead of being probed.

    Raises NoSignature where the class has no list of blocks, or does not run at any size tried.
    """
    module: Any = getattr(model, "_module", model)
    try:
        blocks = block_list(module) if module is model else model.anatomy.backbone.blocks
        found = _Signature(module, blocks, [] if known is None else known)
    except Exception as error:
        if is_internal_error(error):
            raise
        raise NoSignature(
            f"{type(module).__name__} has no signature here: running it with other sizes failed "
            f"with {first_sentence(error)}."
        ) from error
    try:
        return found.json(None if module is model else model)
    except Exception as error:
        if is_internal_error(error):
            raise
        raise NoSignature(
            f"{type(module).__name__} has no signature here: reading its values failed with "
            f"{first_sentence(error)}."
        ) from error


class _Signature:
    """One model's types, checked on the whole model.

    module: the whole model; path: its block list's; ``asked``: the model with few blocks;
    ``layers``: for each of those blocks the equal ones of the whole model; ``sizes``: the numbers
    of the generics.
    """

    def __init__(self, module: Any, path: str, known: Known) -> None:
        self.module, self.path = module, path
        self.reused = False
        try:
            run: RecordedRun | None = recorded_run(module)
        except Exception:  # a forward may raise anything
            run = None
        # Where a choice among experts was made up, it is no size.
        self.run = None if run is None or run.asks_numbers else run
        self._infer(known)
        self.few = self.asked.build()

    def _infer(self, known: Known) -> None:
        """Take the types of a model that differs in sizes alone, or probe this one.

        A class whose forward looks at numbers is run small, with weights.
        """
        config, self.layers, count = few_blocks(self.module, self.path)
        first_blocks = None if count is None else (self.path, count)
        self.asked = ResizableModel(config, type(self.module), first_blocks=first_blocks)
        for inferred in known:
            if inferred.hold_for(self.asked):
                types = self._checked(inferred.types)
                if len(types.unresolved) == len(inferred.types.unresolved):
                    self.inferred, self.types, self.reused = inferred, types, True
                    return
        try:
            probes = probe(self.asked)
        except Exception as error:
            probes = self._probed_with_weights(error)
        self.inferred = InferredTypes(probes, Types.of(probes))
        if not probes.model.with_weights:
            known.append(self.inferred)
        self.types = self._checked(self.inferred.types)

    def _probed_with_weights(self, error: Exception) -> Probes:
        """The probes of a small model of the type; raises ``error`` where there is none or it does
        not run either."""
        config = self.module.config
        kind = config.model_type
        if kind not in decoder_types():
            kind = config.get_text_config().model_type
        if kind not in decoder_types():
            raise error
        small, model_class = small_config(kind), type(self.module)
        few, _, count = few_blocks(build(small, model_class), self.path)
        small = few if count is None else small
        self.asked = ResizableModel(small, model_class, released_config=config)
        try:
            probes = probe(self.asked)
        except Exception:
            raise error from None
        self.layers = counterparts(build(small, model_class), self.module, self.path)
        return probes

    @property
    def sizes(self) -> dict[str, int]:
        return {**self.asked.released, "Layers": len(self.module.get_submodule(self.path))}

    def _checked(self, types: Types) -> Types:
        """The types, checked against the run of the whole model; against its parameters alone where
        it does not run."""
        call = {"B": 1, "S": 1, "Past": 1}
        observation = of_parameters(self.module)
        if self.run is not None:
            observation = of_recorded_run(self.run)
            seq = self.run.prompt.seq
            call = {"B": self.run.prompt.batch, "S": seq, "Past": seq}
        return types.checked_against(
            observation, {**self.sizes, **call}, self._few_site, len(self.layers)
        )

    def _few_site(self, site: TensorSite) -> TensorSite | None:
        """The site in the model with few blocks that one of the whole model corresponds to."""
        if site.what == "cache" and site.path.isdigit():
            at = self._few_layer(int(site.path))
            return None if at is None else site._replace(path=str(at))
        inner = site.path.removeprefix(f"{self.path}.")
        if site.what == "cache" or inner == site.path:
            return None if site.what == "cache" else site
        layer, _, rest = inner.partition(".")
        at = self._few_layer(int(layer))
        return None if at is None else site._replace(path=f"{self.path}.{at}.{rest}".rstrip("."))

    def _few_layer(self, layer: int) -> int | None:
        return next((at for at, layers in enumerate(self.layers) if layer in layers), None)

    def _cache_writers(self) -> dict[int, str]:
        """By few block, the path of the module that writes to the cache."""
        for model, layers_of in ((self.module, self.layers), (self.few, None)):
            try:
                owners = {one.layer: one.path for one in accounting.run(model).owners}
            except Exception:  # a forward may raise anything
                continue
            found: dict[int, str] = {}
            for at in range(len(self.layers)):
                equal = [at] if layers_of is None else layers_of[at]
                layer = next((one for one in equal if one in owners), None)
                if layer is not None:
                    inner = owners[layer].removeprefix(f"{self.path}.{layer}")
                    found[at] = f"{self.path}.{at}{inner}"
            return found
        return {}

    # -- written down --------------------------------------------------------------

    def json(self, model: LanguageModel | None) -> Json:
        """The signature as `signature` has it; with the standard values of ``model``, the loaded
        one."""
        sizes, aliases = self.sizes, self._aliases()
        axes: dict[str, int | str] = {}

        def write(one: Type) -> Json:
            written = one.json(sizes, aliases)
            axes.update(zip(written["dims"], written["numbers"], strict=True))
            return written

        described = Description(
            self.few, self.types, write, self.path, self.layers, self._cache_writers()
        )
        costs = Costs(self.module, self.few, self.types, self.path, self.layers, sizes).json()
        classes = described.classes()
        resolved = self._resolved()
        values: list[Json] = []
        if model is not None:
            values = self._add_values(model, write, classes, resolved)
        found = {
            "variables": table()["variables"],
            "dtype": str(self.module.dtype).removeprefix("torch."),
            "entries": described.entries(),
            "cache": described.cache(),
            "blocks": classes,
            "values": values,
            "costs": costs,
            "resolved": resolved,
        }
        generics = self._generics(aliases, costs["kinds"], sizes)
        simple = {row["name"] for row in generics} | set(table()["variables"])
        composed = {
            text: number
            for text, number in axes.items()
            if not (text in simple or text.isdigit() or text.startswith("?"))
        }
        return {"generics": generics, "axes": composed, **found}

    def _resolved(self) -> Json:
        axes, resolved = self.types.counts
        return {
            "axes": axes,
            "resolved": resolved,
            "probes": len(self.inferred.probes.runs),
            "looks": 1 if self.reused else None,
            "fixed": self.inferred.probes.fixed,
            "unresolved": [
                {"at": ".".join(part for part in site if part), "axis": axis, "number": number}
                for site, axis, number in self.types.unresolved
            ],
        }

    def _add_values(
        self, model: LanguageModel, write: Any, classes: list[Json], resolved: Json
    ) -> list[Json]:
        """The standard values, typed; added to the classes that have them and to what is counted as
        resolved."""
        expressions = self.inferred.hosts.expressions(
            model, self.types, self.layers, self.asked.released
        )
        values, lacking = typed_values(model, expressions, self.asked.released, write)
        axes = sum(len(row["type"]["dims"]) for row in values)
        resolved["axes"] += axes
        resolved["resolved"] += axes - len(lacking)
        resolved["unresolved"] += lacking
        for one in classes:
            one["values"] = [
                {"name": row["name"], "type": row["type"]}
                for row in values
                if set(row["modules"]) & set(one["paths"])
            ]
        return values

    def _aliases(self) -> dict[Expr, str]:
        """Names for expressions that are sizes in their own right: a convolution's channels, and a
        head's width that no figure gives."""
        found: dict[Expr, str] = {}
        taken = set(self.asked.names.values())
        for site, one in self.types.by_site.items():
            if site.call != PREFILL or site.what != "cache" or len(one.axes) < 3:
                continue
            if site.name.startswith("conv_states"):
                axis, name = one.axes[1], "Conv"
            elif site.name == "keys":
                axis, name = one.axes[-1], "HeadDim"
            else:
                continue
            if not isinstance(axis, Expr) or axis.cap is not None or len(axis.names) < 2:
                continue
            if name not in (*taken, *found.values()):
                found[axis] = name
        return found

    def _generics(
        self, aliases: dict[Expr, str], kinds: list[Json], sizes: dict[str, int]
    ) -> list[Json]:
        """The sizes that types are written in, with their numbers and where each comes from."""
        types, dependent = self.types, self.inferred.probes.dependent
        used = {name for axis in types.expressions() for name in axis.names}
        used -= set(table()["variables"])
        used |= {name for size in types.rounded.values() for name in (size.of, size.to)}
        formulas = [*aliases, *(dependent[name] for name in used & dependent.keys())]
        used |= {name for formula in formulas for name in formula.names}
        if "MaxSeq" in sizes:
            used.add("MaxSeq")
        rows: dict[str, Json] = {}
        for name in used | {"Layers"}:
            rows[name] = {"name": name, "number": sizes[name], "source": ""}
            if name in types.rounded:
                rows[name]["formula"] = str(types.rounded[name])
                continue
            key = depth_key(self.module.config) if name == "Layers" else self.asked.keys[name]
            rows[name]["source"] = ".".join(key or ())
            if name in dependent:
                rows[name]["formula"] = dependent[name].text(order())
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
