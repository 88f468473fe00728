"""Prompts given as messages, a first token written twice, and what tokens are called."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from explorer.model.prompts import token_texts
from explorer.widgets.views.labels import axis_label, shown_token
from tests.support.messages import refused, sentence
from tests.support.models import specimen

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

MESSAGES = [{"role": "user", "content": "Hello"}]


def adding_first(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """The specimens' tokenizer, which now adds a first token to every text."""
    tokenizer = copy.deepcopy(specimen("llama").tokenizer)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A",
        special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)],
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def chatting(monkeypatch):
    model = specimen("llama")
    monkeypatch.setattr(model, "tokenizer", adding_first())
    return model


@pytest.mark.parametrize(
    "messages",
    [
        MESSAGES,
        tuple(MESSAGES),
        [*MESSAGES, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And?"}],
    ],
)
def test_messages_are_rendered_by_the_template(chatting, messages):
    run = chatting.record(messages, ["logits"])
    tokenizer = chatting.tokenizer
    wanted = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    assert run.input_ids.tolist() == [wanted["input_ids"]]
    assert run.text == "".join(run.tokens) and run.text.endswith("assistant:")
    first = tokenizer.bos_token_id
    assert run.input_ids[0, 0] == first and run.input_ids[0, 1] != first
    with torch.no_grad():
        assert torch.equal(run["logits"], chatting.hf(run.input_ids).logits)


def test_a_text_is_no_conversation():
    assert specimen("llama").record("Hello", ["logits"]).text is None


def test_a_tokenizer_without_a_template(monkeypatch):
    model = specimen("llama")
    refused("no_chat_template", lambda: model.record(MESSAGES))
    monkeypatch.setattr(model, "tokenizer", adding_first("{{ raise_exception('no system') }}"))
    refused("template_refuses", lambda: model.record(MESSAGES), reason="no system")


def test_a_first_token_that_is_written_and_added_is_warned_of(chatting):
    first = chatting.tokenizer.bos_token
    with pytest.warns(UserWarning, match=sentence("first_token_twice", token=first)):
        run = chatting.record(f"{first}Hello", ["logits"])
    assert run.input_ids[0, :2].tolist() == [chatting.tokenizer.bos_token_id] * 2
    chatting.record("Hello", ["logits"])  # a warning here would be an error


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer whose pieces have their spaces in front, as SentencePiece's."""
    pieces = ["<unk>", "\u2581(", "(", "\u2581", "\u2581\u2581", "\u2581a", "a", "<0xC3>", "<0xA9>"]
    backend = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """One that decodes by the library's own rule for such pieces."""
    pieces = [("<unk>", 0.0), ("\u2581(", -1.0), ("(", -1.0), ("\u2581", -1.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("make", [sentencepiece, metaspace])
def test_pieces_with_and_without_a_space_have_names_of_their_own(make):
    assert token_texts(make(), [1, 2, 3]) == [" (", "(", " "]
    assert [shown_token(text) for text in token_texts(make(), [1, 2, 3])] == ["·(", "(", "·"]
    assert len({axis_label(text) for text in token_texts(make(), [1, 2, 3])}) == 3


def test_further_pieces():
    texts = token_texts(sentencepiece(), [4, 5, 6, 7, 8])
    assert texts == ["  ", " a", "a", "é 1/2", "é 2/2"]


def test_byte_level_tokens_are_named_as_before():
    tokenizer = specimen("llama").tokenizer
    ids = tokenizer("the (a) b  c")["input_ids"]
    assert "".join(token_texts(tokenizer, ids)) == "the (a) b  c"
