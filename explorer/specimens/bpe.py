"""The specimens' tokenizer: a small byte-level BPE of our own.

Every byte is an entry, so any text can be written and read back exactly; the
remaining entries are merges learned from the training text. Train it anew with
``python -m explorer.specimens.bpe``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from explorer.specimens.training import corpus

PATH = Path(__file__).with_name("tokenizer.json")
END = "<|endoftext|>"
ENTRIES = 2048


def train_tokenizer(texts: list[str], entries: int = ENTRIES) -> Tokenizer:
    """A byte-level BPE with ``entries`` entries, the end token included, learned from ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """Load the committed tokenizer: no beginning token, one for end and padding, left padding.

    With left padding the last position of every row, where generation goes on, is a real token.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(PATH)),
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )


def main() -> int:
    try:
        train_text, _ = corpus.split(corpus.chapters(corpus.read_verses()))
    except corpus.CorpusError as error:
        print(error, file=sys.stderr)
        return 2
    tokenizer = train_tokenizer(train_text)
    tokenizer.save(str(PATH))
    print(f"{PATH.name}: {tokenizer.get_vocab_size()} entries from {len(train_text)} chapters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
