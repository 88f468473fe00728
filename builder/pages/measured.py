"""What a trained small model has learned, as figures beside a baseline each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from builder.pages.figures import Figure, count, thousands

Measured = Mapping[str, Any]


def measured_figures(measured: Measured) -> list[Figure]:
    """Return the figures of a specimen's measurements; a measurement of unknown form is listed
    by its path.
    """
    makers: dict[str, Callable[[Any], Iterator[Figure]]] = {
        "parameters": _parameters,
        "text": _text,
        "router": _router,
        "repetition": _repetition,
        "heads": _heads,
        "training": _training,
        "versions": _versions,
    }
    found: list[Figure] = []
    for key, part in measured.items():
        try:
            found += makers[key](part)
        except (KeyError, TypeError):
            # A measurement of a form this module does not know is shown as it is.
            found += [Figure(path, value, "") for path, value in _leaves(key, part)]
    return found


def _parameters(part: int) -> Iterator[Figure]:
    yield Figure("parameters", count(part), f"exactly {thousands(part)}")


def _versions(part: Measured) -> Iterator[Figure]:
    yield Figure(
        "measured with",
        f"torch {part['torch']}",
        ", ".join(f"{name} {version}" for name, version in part.items()),
    )


def _text(part: Measured) -> Iterator[Figure]:
    yield Figure(
        "nats per token on held-out text",
        f"{part['loss_nats_per_token']:.2f}",
        f"unigram baseline {part['unigram_nats_per_token']:.2f}, "
        f"uniform {part['uniform_nats_per_token']:.2f}",
        f"{thousands(part['held_out_tokens'])} tokens in windows of {part['window_tokens']}",
    )


def _router(part: Measured) -> Iterator[Figure]:
    layers = ", ".join(
        f"block {layer['layer']}: {layer['mutual_information']:.2f} against {layer['shuffled']:.2f}"
        for layer in part["layers"]
    )
    note = f"mean over blocks, {thousands(part['tokens'])} tokens, {part['shuffles']} shuffles"
    if "untrained_mean_ratio" in part:
        note += f"; before training {part['untrained_mean_ratio']:.2f} ×"
    yield Figure(
        "how much a token predicts its first expert, against shuffled",
        f"{part['mean_ratio']:.2f} ×",
        f"mutual information in nats, {layers}",
        note,
    )


def _repetition(part: Measured) -> Iterator[Figure]:
    names = {
        "text": "lower loss on a segment's second copy",
        "random": "lower loss on the second copy of random tokens",
    }
    for kind, name in names.items():
        seen = part[kind]
        yield Figure(
            name,
            f"{seen['lower_by']:.2f} nats",
            f"first copy {seen['first_copy']:.2f}, second {seen['second_copy']:.2f} nats per token",
            f"{part['segments']} segments of {part['segment_tokens']} tokens",
        )


def _heads(part: Measured) -> Iterator[Figure]:
    names = {
        "previous_token": "strongest previous-token head",
        "induction_target": "strongest induction head",
    }
    for kind, name in names.items():
        best = part[kind]
        even = best["even_share"]
        for host, head in best.items():
            if host != "even_share":
                note = (
                    f"read as {part['linear_attn_read_as']}"
                    if host == "linear_attn"
                    else "read from attention_probabilities"
                )
                where = f"block {head['layer']}, head {head['head']}"
                yield Figure(
                    f"{name}, {host}",
                    f"{100 * head['share']:.0f} %",
                    f"{where}; uniform attention gives {100 * even:.1f} %",
                    note,
                )


def _training(part: Measured) -> Iterator[Figure]:
    yield Figure(
        "processor time of training",
        f"{part['processor_seconds'] / 60:.0f} min",
        f"{thousands(part['steps'])} steps, {thousands(part['tokens'])} tokens",
        f"seed {part['seed']}, {part['threads']} thread{'s' if part['threads'] != 1 else ''}, "
        f"{part['seconds'] / 60:.0f} min of wall time",
    )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every number and text under ``value`` with the path of keys to it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    elif isinstance(value, list | tuple):
        yield (
            path,
            ", ".join(f"{item:.4g}" if isinstance(item, float) else str(item) for item in value),
        )
    else:
        yield path, f"{value:.4g}" if isinstance(value, float) else str(value)
