"""``python -m builder bench``: what the parts cost, each as a ratio taken in one run or as what a browser saw.

Sections: ``facts`` (collecting a family's record), ``build`` (the whole site, and the
memory of a family), ``record`` (reading values of a real model), ``site`` (the slider
of a page, what a page weighs), ``app`` (the heads of the explorer). Aims are printed beside the figures and enforced by nobody.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.bench.timing import against, cores, once, peak_above_start
from builder.commands.weights import gguf_path

SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TOKENS = 256
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Figure:
    """One measured number: ``value`` in ``unit``, the aim it is held against (None: no aim), how it came about, and the worst of several."""

    section: str
    name: str
    value: float
    unit: str
    aim: float | None
    detail: str
    worst: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.aim is None else self.value <= self.aim


@dataclass(frozen=True)
class Settings:
    """What to measure and how often; ``quick`` is for trying the measurements themselves, ``named`` says that the families were asked for."""

    families: tuple[str, ...] = ()
    site: Path | None = None
    quick: bool = False
    named: bool = False

    @property
    def repeats(self) -> int:
        return 1 if self.quick else 7

    @property
    def tokens(self) -> int:
        return 64 if self.quick else TOKENS

    @property
    def steps(self) -> int:
        return 5 if self.quick else 50


def facts_section(settings: Settings) -> Iterator[Figure]:
    """Collecting a family's facts against one meta build and one meta forward of the same checkpoint."""
    import torch

    import explorer.engine.nnsight_api  # noqa: F401  before a modeling module of transformers is imported
    from builder.records.collect import proof
    from explorer.checkpoints import cards
    from explorer.facts.record import checkpoints, facts
    from explorer.meta_device import build_meta
    from explorer.specimens.small import default_config

    for family in settings.families:
        checkpoint = checkpoints(family)[0]
        report, specimen = proof(
            family
        )  # run once per release of the library, then kept: not part of collecting
        ids = torch.zeros(2, 7, dtype=torch.long, device="meta")

        def floor() -> None:
            model = build_meta(
                cards.config(checkpoint) if checkpoint in cards.IDS else default_config(family)
            )
            with torch.no_grad():
                model(input_ids=ids)

        ratio = against(
            lambda: facts(family, checkpoint, report, specimen), floor, settings.repeats
        )
        detail = f"{checkpoint}: {_ms(ratio.ours)} against {_ms(ratio.theirs)} for a meta build and forward"
        yield Figure("facts", f"facts of {family}", ratio.value, "x", 2.0, detail)


def build_section(settings: Settings) -> Iterator[Figure]:
    """A build of everything that is proven, against the meta builds and forwards it cannot do without."""
    from builder.bench.site_build import build_rows

    for row in build_rows(settings):
        yield Figure("build", *row)


def record_section(settings: Settings) -> Iterator[Figure]:
    """Every router, attention and state value in one recording, against transformers' own forward."""
    import torch

    model, label = small_model()
    native, names = untouched(model._module), inner_values(model)
    ids = torch.randint(
        0, model.config.vocab_size, (1, settings.tokens), generator=torch.Generator().manual_seed(0)
    )

    def ours() -> object:
        return model.record(ids, values=names)

    def theirs() -> object:
        with torch.no_grad():
            return native(input_ids=ids, output_attentions=True)

    once(theirs)
    peaks = [peak_above_start(call) / MEGABYTE for call in (ours, theirs)]
    kept = ours().bytes / MEGABYTE
    ratio = against(ours, theirs, settings.repeats)
    detail = f"{label}, {settings.tokens} tokens: {_ms(ratio.ours)} against {_ms(ratio.theirs)} with output_attentions=True"
    yield Figure(
        "record", "record / native forward", ratio.value, "x", 1.15, f"{detail}; {', '.join(names)}"
    )
    yield Figure(
        "record",
        "record, peak memory",
        peaks[0],
        "MB",
        None,
        f"above the loaded model; {kept:.0f} MB of it are the recording itself; the native forward peaks at {peaks[1]:.0f} MB",
    )


def small_model() -> tuple[object, str]:
    """SmolLM2-135M where it is installed, else random weights of that size, with words for which."""
    from explorer import load

    path = gguf_path()
    if path is not None:
        return load(path), f"SmolLM2-135M, {path.name}"
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder))
        return load(folder), "random weights of SmolLM2-135M's size"


def untouched(module: object) -> object:
    """transformers' own model around the same weights, without anything the engine hung on ``module``."""
    from transformers import AutoModelForCausalLM

    fresh = AutoModelForCausalLM.from_config(
        module.config, attn_implementation="eager", dtype=module.dtype
    ).eval()
    fresh.load_state_dict(module.state_dict(), assign=True)
    fresh.tie_weights()
    return fresh


def write_random(folder: Path) -> None:
    """A checkpoint of SmolLM2-135M's shape with random weights, for a machine without the real one."""
    import torch
    from transformers import AutoModelForCausalLM

    from explorer import specimens
    from explorer.checkpoints import cards

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(cards.config(SMALL)).save_pretrained(folder)
    specimens.build("llama").tokenizer.save_pretrained(folder)


def inner_values(model: object) -> list[str]:
    """Names with their hosts of every router, attention and state value the model serves in one forward.

    What is computed afterwards from other values (a state for every token, the
    implied attention) is not part of a forward and is left out.
    """
    routing = {"router_logits", "router_scores", "expert_weights", "expert_indices"}
    inside = {"self_attn", "linear_attn"}
    return list(
        dict.fromkeys(
            f"{row.host}.{row.name}"
            for row in model.support()
            if row.layers and not row.value.derived and (row.host in inside or row.name in routing)
        )
    )


def site_section(settings: Settings) -> Iterator[Figure]:
    """The slider of each page, and what a page weighs."""
    from builder.bench import browser as eyes

    with eyes.built_site(settings) as site, eyes.launched() as browser:
        for row in eyes.slider_rows(settings, site, browser):
            yield Figure("site", *row)
        for row in eyes.weight_rows(settings, site, browser):
            yield Figure("site", *row)


def app_section(settings: Settings) -> Iterator[Figure]:
    """The change of head at a long prompt, and the largest message."""
    from builder.bench import browser as eyes

    with eyes.launched() as browser:
        for row in eyes.head_rows(settings, browser):
            yield Figure("app", *row)


SECTIONS: dict[str, Callable[[Settings], Iterator[Figure]]] = {
    "facts": facts_section,
    "build": build_section,
    "record": record_section,
    "site": site_section,
    "app": app_section,
}


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def measure(
    sections: Iterable[str], settings: Settings, say: Callable[[str], None]
) -> tuple[list[Figure], dict[str, str]]:
    """All figures of ``sections`` and, for a section that failed, why. One failing leaves the others measured."""
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    for name in sections:
        say(f"measuring {name} ...")
        try:
            for figure in SECTIONS[name](settings):
                figures.append(figure)
                say("  " + line(figure))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"  failed: {failed[name]}")
    return figures, failed


def amount(value: float, unit: str) -> str:
    digits = 2 if unit == "x" else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def line(figure: Figure) -> str:
    return f"{figure.name}: {amount(figure.value, figure.unit)}"


def table(figures: list[Figure]) -> str:
    """The figures as aligned text: name, value, worst, aim, whether it is met, and the detail under it."""
    rows = [
        (
            f.name,
            amount(f.value, f.unit),
            "" if f.worst is None else amount(f.worst, f.unit),
            "" if f.aim is None else f"<= {f.aim:g}",
            {True: "met", False: "missed", None: ""}[f.met],
        )
        for f in figures
    ]
    head = ("figure", "measured", "worst", "aim", "")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in [head, *rows]
    ]
    details = [f"    {figure.detail}" for figure in figures]
    return "\n".join([lines[0], *(part for pair in zip(lines[1:], details) for part in pair)])


def setting_words() -> str:
    import torch

    return f"{cores()} cores, torch {torch.__version__} with {torch.get_num_threads()} threads"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m builder bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument(
        "--only", metavar="SECTION", choices=list(SECTIONS), nargs="+", help=", ".join(SECTIONS)
    )
    parser.add_argument(
        "--family",
        nargs="+",
        default=None,
        help="families to measure (default: those with notes; the build: all that are proven)",
    )
    parser.add_argument("--site", type=Path, help="a built site (default: built for the occasion)")
    parser.add_argument(
        "--quick", action="store_true", help="one repeat and few steps, to see that it runs"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    from builder.records.collect import UnknownFamily
    from builder.records.collect import families as known

    args = parse(argv)
    try:
        families = tuple(known(args.family))
    except UnknownFamily as error:
        print(error, file=sys.stderr)
        return 2
    settings = Settings(families, args.site, args.quick, args.family is not None)
    figures, failed = measure(
        args.only or SECTIONS, settings, lambda text: print(text, file=sys.stderr, flush=True)
    )
    if args.json:
        print(
            json.dumps(
                {
                    "setting": setting_words(),
                    "figures": [asdict(f) | {"met": f.met} for f in figures],
                    "failed": failed,
                },
                indent=1,
            )
        )
    else:
        print(f"\n{setting_words()}\n\n{table(figures)}")
    for name, why in failed.items():
        print(f"The section {name} failed: {why}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
