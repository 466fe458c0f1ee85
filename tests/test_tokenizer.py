"""Text to tokens and back, from files alone. Every tokenizer here is made on the spot."""

import json
import unicodedata
from pathlib import Path

import checkpoints
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import polestar_jax as pj
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig
from polestar_jax.tokenizer import Tokenizer as Ours

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock, isn't it?\n\n",
    "def f(x):\n    return x + 1  # naïve café, 北京, привет, 🙂\r\n",
] * 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
CHAT = (
    "{% for m in messages %}{{ bos_token }}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained() -> Tokenizer:
    """Byte-level merges learnt from the corpus, some 290 tokens."""
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\w+|\W+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rules.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    rules.train_from_iterator(CORPUS, trainer)
    return rules


def model_config(family: str, rules: Tokenizer, **changes) -> ModelConfig:
    """Sizes and special tokens of a model that goes with a tokenizer."""
    ids = {
        f"{name}_token_id": rules.token_to_id(token)
        for name, token in (
            ("mask", "<|mask|>"),
            ("eos", "<|endoftext|>"),
            ("pad", "<|endoftext|>"),
        )
    }
    size = {"vocab_size": 400} | ({"embedding_size": 400} if family == "llada" else {})
    return checkpoints.config(checkpoints.SMALL[family] | size | ids | changes)


def llada(directory: Path, **settings) -> tuple[Ours, Tokenizer, ModelConfig]:
    rules = trained()
    rules.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    rules.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<|beginoftext|>", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | settings))
    config = model_config("llada", rules, eot_token_id=rules.token_to_id("<|im_end|>"))
    return Ours.load(directory, config), rules, config


def dream(directory: Path, **settings) -> tuple[Ours, ModelConfig]:
    """vocab.json and merges.txt as Dream ships them, with the tokens outside the vocabulary."""
    rules = trained()
    rules.model.save(str(directory))
    first = rules.get_vocab_size()
    added = {
        str(first + i): {"content": t, "special": True, "normalized": False, "lstrip": False}
        for i, t in enumerate(SPECIAL)
    } | {str(first + len(SPECIAL)): {"content": "<tool_call>", "special": False}}
    shipped = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "tokenizer_class": "DreamTokenizer",
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(shipped | settings))
    (directory / "tokenization_dream.py").write_text("raise SystemExit('this must never run')")
    rules.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    config = model_config("dream", rules)
    return Ours.load(directory, config), config


@pytest.fixture(scope="module", params=["llada", "dream"])
def tokenizer(request, tmp_path_factory) -> Ours:
    make = {"llada": llada, "dream": dream}[request.param]
    return make(tmp_path_factory.mktemp(request.param))[0]


TEXT = st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda t: "<" not in t)


@settings(max_examples=200, deadline=None)
@given(text=TEXT | st.sampled_from([*CORPUS, "", " ", "\n\n  \t", "1234567", "It'S we'LL"]))
def test_text_comes_back_as_it_went_in(tokenizer, text):
    expected = unicodedata.normalize("NFC", text)  # Qwen2 composes characters, as Dream does
    back = tokenizer.decode(tokenizer.encode(text))
    assert unicodedata.normalize("NFC", back) == expected


def test_dream_from_its_two_files_is_transformers_own_qwen2(tmp_path):
    from transformers import Qwen2TokenizerFast

    ours, _ = dream(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["auto_map"]
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = Qwen2TokenizerFast.from_pretrained(tmp_path)
    texts = [
        *CORPUS,
        "a\u0301 e\u0301",
        "x<|im_start|>y <tool_call>z",
        "  two\n\nlines  \n",
        "'S 'tis 90210",
    ]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    assert ours.encode("x<|im_start|>y")[1] == theirs.convert_tokens_to_ids("<|im_start|>")


def test_llada_is_its_tokenizer_json(tmp_path):
    ours, rules, _ = llada(tmp_path)
    for text in CORPUS:
        assert ours.encode(text) == rules.encode(text).ids


def test_no_special_token_is_added_even_where_the_file_says_so(tmp_path):
    from tokenizers.processors import TemplateProcessing

    _, rules, config = llada(tmp_path)
    bos = ("<|beginoftext|>", rules.token_to_id("<|beginoftext|>"))
    rules.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    rules.save(str(tmp_path / "tokenizer.json"))
    assert rules.encode("dog").ids[0] == bos[1]
    assert Ours.load(tmp_path, config).encode("dog") == rules.encode("dog").ids[1:]


def test_an_answer_ends_at_the_first_stop_token_and_holds_no_special_one(tmp_path):
    ours, rules, config = llada(tmp_path)
    dog, fox = ours.encode(" dog"), ours.encode(" fox")
    mask, begin = config.mask_token, rules.token_to_id("<|beginoftext|>")
    assert ours.decode([begin, *dog, mask, *fox, config.eos_token, *dog]) == " dog fox"
    assert ours.decode([*dog, config.eot_token, *fox]) == " dog"
    assert ours.decode([config.eos_token, *dog]) == ""
    assert ours.decode([]) == ""


def test_a_token_that_the_model_has_and_the_tokenizer_lacks_is_no_text(tmp_path):
    ours, _, config = llada(tmp_path)
    assert ours.decode([config.vocab_size - 1, *ours.encode("fox")]) == "fox"


def test_half_a_character_does_not_raise(tokenizer):
    ids = tokenizer.encode("🙂")
    assert "�" in tokenizer.decode(ids[:1])


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "list"])
@pytest.mark.parametrize("make", [llada, dream])
def test_a_prompt_of_a_tuned_model_goes_into_its_chat_template(make, where, tmp_path):
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(CHAT)
        ours = make(tmp_path, chat_template="{{ stale }}")[0]
    elif where == "list":
        several = [{"name": "tools", "template": "{{ no }}"}, {"name": "default", "template": CHAT}]
        ours = make(tmp_path, chat_template=several)[0]
    else:
        ours = make(tmp_path, chat_template=CHAT)[0]
    framed = "<|beginoftext|><|im_start|>user\nlazy dog<|im_end|>\n<|im_start|>assistant\n"
    assert ours.encode_prompt("lazy dog") == ours.encode(framed)
    assert len(ours.encode_prompt("")) < len(ours.encode_prompt("lazy dog"))


def test_without_a_template_a_prompt_is_the_text(tokenizer):
    assert tokenizer.encode_prompt("lazy dog") == tokenizer.encode("lazy dog")


@pytest.mark.parametrize(
    ("name", "chat"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", True),
        ("GSAI-ML/LLaDA-8B-Base", False),
        ("Dream-org/Dream-v0-Base-7B", False),
        ("/data/base/LLaDA-1.5", True),
        ("/cache/models--GSAI-ML--LLaDA-8B-Base/snapshots/0123abc", False),
        ("database", True),
    ],
)
def test_a_base_model_gets_no_template_even_if_it_carries_one(name, chat, tmp_path):
    _, _, config = llada(tmp_path, chat_template=CHAT)
    assert Ours.load(tmp_path, config, name=name).chat is chat
    for choice in (True, False):
        assert Ours.load(tmp_path, config, name=name, chat=choice).chat is choice


def test_asking_for_a_template_that_is_not_there_is_one_sentence(tmp_path):
    _, _, config = llada(tmp_path)
    with pytest.raises(PolestarError, match="has no chat template"):
        Ours.load(tmp_path, config, chat=True)


def test_a_directory_without_tokenizer_files_has_none(tmp_path):
    assert Ours.load(tmp_path, checkpoints.config(checkpoints.SMALL["llada"])) is None


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_one_sentence(broken, tmp_path):
    _, _, config = llada(tmp_path)
    file = tmp_path / broken
    file.write_text(file.read_text()[:-20])
    with pytest.raises(PolestarError) as caught:
        Ours.load(tmp_path, config)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("template", ["{% if", "{{ messages[0].content.x.y }}", "{{ 1 + 'a' }}"])
def test_a_damaged_chat_template_is_one_sentence(template, tmp_path):
    ours = llada(tmp_path, chat_template=template)[0]
    with pytest.raises(PolestarError, match=r"chat template is damaged: .*; use chat=False"):
        ours.encode_prompt("lazy dog")


@pytest.mark.parametrize("template", [7, {"default": CHAT}])
def test_a_chat_template_that_is_no_text_is_one_sentence(template, tmp_path):
    with pytest.raises(PolestarError, match="chat template in .* must be text"):
        llada(tmp_path, chat_template=template)


def test_a_chat_template_that_is_not_utf_8_is_one_sentence(tmp_path):
    _, _, config = llada(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(PolestarError, match=r"chat_template\.jinja cannot be read"):
        Ours.load(tmp_path, config)


def test_a_tokenizer_without_tokens_is_one_sentence(tmp_path):
    _, _, config = llada(tmp_path)
    Tokenizer(models.BPE({}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(PolestarError, match="has no tokens"):
        Ours.load(tmp_path, config)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_half_a_tokenizer_is_one_sentence(missing, tmp_path):
    _, config = dream(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(PolestarError, match=f"is incomplete: {missing} is missing"):
        Ours.load(tmp_path, config)


def test_added_tokens_whose_ids_do_not_follow_the_vocabulary_are_refused(tmp_path):
    _, config = dream(tmp_path)
    gap = {"added_tokens_decoder": {"390": {"content": "<|mask|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(gap))
    with pytest.raises(PolestarError, match="should have the id 390"):
        Ours.load(tmp_path, config)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    llada(tmp_path)
    with pytest.raises(PolestarError, match="but the model has only 40 tokens"):
        Ours.load(tmp_path, checkpoints.config(checkpoints.SMALL["llada"]))


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["list"]])
def test_what_is_not_text_is_refused(text, tokenizer):
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(PolestarError, match="text must be a string"):
            encode(text)


def test_half_a_surrogate_pair_is_refused_with_its_position():
    tokenizer = pj.load("embedded").tokenizer
    with pytest.raises(PolestarError, match="position 5"):
        tokenizer.encode("copy \ud800")
