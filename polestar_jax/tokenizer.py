"""Text to token ids and back, built from a checkpoint's files alone.

LLaDA ships a `tokenizer.json`. Dream ships `vocab.json` and `merges.txt` with Python code of its
own, which is never run: its tokenizer is Qwen2's byte-level BPE, rebuilt here from those two files.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

# How Qwen2 cuts text into words before the merges: contractions, words with at most one sign in
# front, single digits, runs of signs, line ends, other white space.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """`chat`: prompts are put into the chat template, as models tuned on instructions expect."""

    backend: "PreTrainedTokenizerFast"
    chat: bool
    stop_tokens: frozenset[int]  # an answer ends before the first of these: EOS, end of turn
    silent_tokens: frozenset[int]  # never part of the text: mask, padding, beginning of text

    @classmethod
    def load(
        cls, directory: Path, config: ModelConfig, *, name: str = "", chat: bool | None = None
    ) -> "Tokenizer | None":
        """The tokenizer of a checkpoint directory, or None when it has no tokenizer files.

        `chat=None` decides by the files: yes when there is a chat template, except for a checkpoint
        whose name (`name`, else the directory's) says "-Base", since those carry the template of
        their tuned sibling. Raises PolestarError for broken files, for a tokenizer with more tokens
        than the model, and for `chat=True` without a template.
        """
        settings = _json(directory / "tokenizer_config.json")
        rules = _rules(directory, settings)
        if rules is None:
            return None
        template = _template(directory, settings)
        if chat and template is None:
            raise PolestarError(f"{directory} has no chat template; use chat=False")
        backend = _backend(rules, settings, template)
        if not (vocabulary := backend.get_vocab()):
            raise PolestarError(f"the tokenizer in {directory} has no tokens; download it again")
        if (highest := max(vocabulary.values())) >= config.vocab_size:
            raise PolestarError(
                f"the tokenizer in {directory} goes up to token {highest}, but the model has only "
                f"{config.vocab_size} tokens; use the tokenizer that belongs to the model"
            )
        if chat is None:
            chat = template is not None and not _named_base(name or str(directory.resolve()))
        c = config
        stop = frozenset(t for t in (c.eos_token, c.eot_token) if t is not None)
        silent = frozenset(t for t in (c.mask_token, c.pad_token, c.bos_token) if t is not None)
        return cls(backend, chat, stop, silent)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text as it stands: no template, no special token added."""
        if not isinstance(text, str):
            raise PolestarError(f"text must be a string, got {type(text).__name__}")
        _check_unicode(text)
        return list(self.backend.encode(text, add_special_tokens=False))

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a user's message: inside the chat template when `chat`, else `encode`."""
        if not self.chat:
            return self.encode(text)
        if not isinstance(text, str):
            raise PolestarError(f"text must be a string, got {type(text).__name__}")
        turn = [{"role": "user", "content": text}]
        try:
            framed = self.backend.apply_chat_template(
                turn, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a small program: it can fail in any way
            raise PolestarError(
                f"the model's chat template is damaged: {error}; use chat=False (--raw)"
            ) from None
        return self.encode(str(framed))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of an answer: special tokens and everything from the first stop token on dropped."""
        kept = []
        for token in (int(i) for i in ids):
            if token in self.stop_tokens:
                break
            if token not in self.silent_tokens:
                kept.append(token)
        return str(
            self.backend.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def _check_unicode(text: str) -> None:
    """Half a surrogate pair, as damaged bytes leave it, is no character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PolestarError(
            f"the text has no character at position {error.start} ({text[error.start]!r}); "
            "save it as UTF-8"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolestarError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise PolestarError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _rules(directory: Path, settings: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` of the directory, or None."""
    from tokenizers import Tokenizer as Rules

    whole, vocab, merges = (directory / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if whole.exists():
            return Rules.from_file(str(whole))
        if vocab.exists() and merges.exists():
            return _byte_level(vocab, merges, _added_tokens(directory, settings))
    except PolestarError:
        raise
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        raise PolestarError(f"the tokenizer in {directory} is damaged: {error}") from None
    if vocab.exists() or merges.exists():
        lacks = merges.name if vocab.exists() else vocab.name
        raise PolestarError(f"the tokenizer in {directory} is incomplete: {lacks} is missing")
    return None


def _byte_level(vocab: Path, merges: Path, added: Mapping[int, Mapping[str, Any]]) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Rules

    rules = Rules(models.BPE.from_file(str(vocab), str(merges)))
    rules.normalizer = normalizers.NFC()
    rules.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rules.decoder = decoders.ByteLevel()
    for token_id, fields in sorted(added.items()):
        token = AddedToken(**{"normalized": False, **fields})
        rules.add_special_tokens([token]) if token.special else rules.add_tokens([token])
        if rules.token_to_id(token.content) != token_id:  # the library numbers them itself
            raise PolestarError(
                f"{vocab.parent}: token {token.content!r} should have the id {token_id}, "
                f"but comes to {rules.token_to_id(token.content)}; the tokenizer files do not match"
            )
    return rules


def _added_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Tokens outside the vocabulary, by id, with the fields of `tokenizers.AddedToken`."""
    if listed := settings.get("added_tokens_decoder"):
        return {int(token_id): dict(fields) for token_id, fields in listed.items()}
    plain = _json(directory / "added_tokens.json")
    return {int(i): {"content": content, "special": True} for content, i in plain.items()}


def _backend(
    rules: Any, settings: Mapping[str, Any], template: str | None
) -> "PreTrainedTokenizerFast":
    with _without_advice():
        from transformers import PreTrainedTokenizerFast

    # Only what a chat template may name; the ids of special tokens are the model configuration's.
    named = {}
    for key in ("bos_token", "eos_token", "pad_token", "mask_token", "unk_token"):
        value = settings.get(key)
        content = value.get("content") if isinstance(value, Mapping) else value
        if content is not None and rules.token_to_id(content) is not None:
            named[key] = content
    return PreTrainedTokenizerFast(
        tokenizer_object=rules,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **named,
    )


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """While transformers is imported: no remark that PyTorch, which we do not need, is missing."""

    def worth_saying(record: logging.LogRecord) -> bool:
        return "PyTorch" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(worth_saying)
    try:
        yield
    finally:
        logger.removeFilter(worth_saying)


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    if (file := directory / "chat_template.jinja").exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PolestarError(f"{file} cannot be read: {error}") from None
    value = _json(directory / "chat_template.json").get("chat_template")
    value = value or settings.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = [entry for entry in value if isinstance(entry, Mapping)]
        value = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if value is not None and not isinstance(value, str):
        raise PolestarError(
            f"the chat template in {directory} must be text, not a {type(value).__name__}"
        )
    return value


def _named_base(name: str) -> bool:
    """Whether a path or repository name is that of a base model, "LLaDA-8B-Base" for example."""
    parts = name.replace("\\", "/").rstrip("/").split("/")
    last = parts[-3] if len(parts) >= 3 and parts[-2] == "snapshots" else parts[-1]  # hub cache
    return re.search(r"[-_.]base([-_.]|$)", last, re.IGNORECASE) is not None
