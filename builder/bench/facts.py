"""Collecting a family's facts, against one meta build and one meta forward of the same
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from builder.bench.figures import Figure, Settings, milliseconds
from builder.bench.timing import Ratio, against
from builder.records.collect import contract_report
from builder.records.threads import one_thread


def measure(settings: Settings) -> Iterator[Figure]:
    """Yield the ratio for a family's first checkpoint, and for a further one, which starts from
    the first one's types.
    """
    import explorer.engine.nnsight_api  # noqa: F401  before a modeling module of transformers is imported
    from explorer.facts.record import checkpoints, facts
    from explorer.signature import Known

    repeats = min(3, settings.repeats)

    def ratio(family: str, checkpoint: str, known: Known) -> Ratio:
        report, specimen = contract_report(family)  # cached once per release of the library
        with one_thread():  # as a build does
            return against(
                lambda: facts(family, checkpoint, report, specimen, list(known)),
                lambda: meta_run(family, checkpoint),
                repeats,
            )

    for family in settings.families:
        first, *further = checkpoints(family)
        found = ratio(family, first, [])
        yield Figure(f"facts of {family}", found.value, "x", 2.0, _detail(first, found))
        if further:
            known: Known = []
            facts(family, first, known=known)
            found = ratio(family, further[0], known)
            name = f"facts of a further checkpoint of {family}"
            yield Figure(name, found.value, "x", 2.0, _detail(further[0], found))


def meta_run(family: str, checkpoint: str) -> None:
    """Build a checkpoint on the meta device and run it once: the least that collecting its facts
    can take.
    """
    import torch

    from explorer.checkpoints import cards
    from explorer.meta_device import build_meta, without_padding_warning
    from explorer.specimens.small import default_config

    model = build_meta(
        cards.config(checkpoint) if checkpoint in cards.IDS else default_config(family)
    )
    ids = torch.zeros(2, 7, dtype=torch.long, device="meta")
    with one_thread(), torch.no_grad(), without_padding_warning(model):
        model(input_ids=ids)


def _detail(checkpoint: str, ratio: Ratio) -> str:
    times = f"{milliseconds(ratio.ours)} against {milliseconds(ratio.theirs)}"
    return f"{checkpoint}: {times} for a meta build and forward"
