"""The embedded model's tokenizer: whole words, digits, letters and runs of punctuation.

A last name's token carries the space before it, so that joining the tokens restores the text and
`James` the first name differs from ` James` the last name.
"""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.tasks import TASKS
from benchmarks.tasks.names import FIRST_NAMES, LAST_NAMES

MASK, EOS, BOS, SEP, UNKNOWN = "<|mask|>", "<|eos|>", "<|bos|>", "<|sep|>", "<|unk|>"
SPECIAL = (MASK, EOS, BOS, SEP, UNKNOWN)

# Longest first, for the regular expression takes the first alternative that fits.
PUNCTUATION = (
    '" ["',
    '", "',
    ' ["',
    '["',
    '"]',
    ' "',
    " [",
    " + ",
    ", ",
    "[",
    "]",
    '"',
    ",",
    "\n",
    " ",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}<|sep|>"
)


def vocabulary() -> dict[str, int]:
    """Token -> id, the special tokens first."""
    words = [
        *SPECIAL,
        *TASKS,
        *PUNCTUATION,
        *string.digits,
        *string.ascii_uppercase,
        *FIRST_NAMES,
        *(f" {name}" for name in LAST_NAMES),
    ]
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def build_tokenizer() -> Tokenizer:
    """A `WordLevel` tokenizer with a regular-expression split; no template is applied."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    runs = "|".join(_escape(run) for run in PUNCTUATION)
    pattern = f" (?:[A-Z][a-z]+)+|(?:[A-Z][a-z]+)+|[a-z_]+|[A-Z]|[0-9]|{runs}"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    return tokenizer


def _escape(run: str) -> str:
    return "".join(f"\\{c}" if c in "[]+" else c for c in run)


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as Hugging Face's loaders read them."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "unk_token": UNKNOWN,
        "sep_token": SEP,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
