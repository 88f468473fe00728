"""Train the specimens' tokenizer: ``python -m explorer.specimens.training.tokenizer``."""

from __future__ import annotations

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from explorer.specimens.bpe import END, ENTRIES, PATH
from explorer.specimens.training import corpus


def train_tokenizer(texts: list[str], vocab_size: int = ENTRIES) -> Tokenizer:
    """Return a byte-level BPE of ``vocab_size`` entries, with the end token, learned from
    ``texts``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> int:
    """Train the tokenizer and write its file; return the exit status: 0, or 2 without the text."""
    try:
        train_text, _ = corpus.split_held_out(corpus.chapters(corpus.read_verses()))
    except corpus.CorpusError as error:
        print(error, file=sys.stderr)
        return 2
    tokenizer = train_tokenizer(train_text)
    tokenizer.save(str(PATH))
    print(f"{PATH.name}: {tokenizer.get_vocab_size()} entries from {len(train_text)} chapters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
