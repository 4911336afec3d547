"""The tokenizer against transformers' own, for a folder and for GGUF; and streams against whole texts."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from interleaf.engine.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from interleaf.errors import CheckpointError, ModelRejected, RequestRejected

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\n\nlines ",
    "naïve café, Ελληνικά, 東京, עברית",
    "emoji 👍🏽 family 👩‍👩‍👧 flag 🇩🇰",
    "def f(x):\n    return x ** 2  # code",
    "it's we'll I'd they've",
    "<|im_start|>user\nhi<|im_end|>",
    "a\x00b\ufffd c\u2028d",
]
DIGITS = ["a  5", "123", "x12 3,4.5", "1️⃣ ½ ²", "in 2024  the 7"]
CONVERSATIONS = [
    [{"role": "user", "content": "Hi, what is 1+1?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": " c "}],
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train(byte_fallback: bool) -> Backend:
    """A tiny BPE: byte-level as in Llama 3 and Qwen, or with spaces as letters and single bytes as in Llama 2."""
    backend = Backend(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True) if byte_fallback else models.BPE()
    )
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    if byte_fallback:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    ascii_only = [text.encode("ascii", "ignore").decode() for text in TEXTS] * 3
    backend.train_from_iterator(ascii_only if byte_fallback else TEXTS * 3, trainer)
    if byte_fallback:  # bytes are ordinary tokens, not special ones
        config = json.loads(backend.to_str())
        config["added_tokens"] = [t for t in config["added_tokens"] if not t["content"].startswith("<0x")]
        backend = Backend.from_str(json.dumps(config))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture(scope="module", params=[False, True], ids=["byte-level", "byte-fallback"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer and the configuration of a model."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=train(byte_fallback=request.param),
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return loaded(folder)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return loaded(smollm2_gguf)


def loaded(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(str(path))
    assert tokenizer is not None
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> tuple[list[str], str]:
    """What each token gave, and what was left."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens)
    return [decoder.push(i) for i in ids], decoder.flush()


# --- folders --------------------------------------------------------------------------------------------------------


def test_ids_and_texts_are_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS + DIGITS:
        for special in (True, False):
            ids = oracle.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)
    assert tokenizer.vocab_size == len(oracle)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (oracle.bos_token_id, (oracle.eos_token_id,))


@pytest.mark.parametrize("prompt", [True, False])
def test_conversations_are_rendered_as_by_transformers(folder: Path, tokenizer: Tokenizer, prompt: bool) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    for messages in CONVERSATIONS:
        ids = oracle.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.apply_chat(messages, add_generation_prompt=prompt) == ids


def test_a_template_in_tokenizer_config_is_read_too(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert loaded(tmp_path).apply_chat(CONVERSATIONS[1]) == tokenizer.apply_chat(CONVERSATIONS[1])


def test_truncation_and_padding_left_in_the_file_are_not_applied(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token="</s>", pad_id=2)
    backend.save(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert loaded(tmp_path).encode(text) == tokenizer.encode(text)


def test_a_folder_without_a_template_takes_text_and_refuses_messages(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    plain = loaded(tmp_path)
    assert not plain.has_chat_template
    assert plain.encode("hello")
    with pytest.raises(RequestRejected, match="no chat template"):
        plain.apply_chat(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least 1 message"),
        (["hello"], "message 0 must be a mapping"),
        ([{"role": "user"}], '"role" and "content"'),
        ([{"role": "user", "content": "a"}, {"role": 1, "content": "a"}], "message 1"),
        ([{"role": "wizard", "content": "a"}], "no role wizard"),
    ],
)
def test_messages_that_are_malformed_or_that_the_template_refuses_are_rejected(
    tokenizer: Tokenizer, messages: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(RequestRejected, match=reason):
        tokenizer.apply_chat(messages)


def test_a_text_that_is_no_unicode_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestRejected, match="valid Unicode"):
        tokenizer.encode("half a pair \ud83d")


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(str(tmp_path)) is None
    assert load_tokenizer(str(tmp_path / "config.json")) is None


@pytest.mark.parametrize(
    ("file", "message"),
    [("tokenizer.json", "cannot be read"), ("tokenizer.model", "has tokenizer.model but no tokenizer.json")],
)
def test_files_that_are_damaged_or_of_another_kind_are_named(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_text("{")
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("folder", [False], indirect=True, ids=["byte-level"])
def test_no_modelling_code_is_imported(folder: Path) -> None:
    script = (
        "import sys\n"
        "from interleaf.engine.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(folder)!r}).apply_chat([{{'role': 'user', 'content': 'x'}}])\n"
        "print([m for m in sys.modules if m.startswith('transformers.') and 'modeling' in m])\n"
    )
    source = str(Path(sys.modules["interleaf"].__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


# --- GGUF -----------------------------------------------------------------------------------------------------------


def test_digits_stand_alone_in_the_built_in_model(smollm2: Tokenizer) -> None:
    assert [smollm2.decode([i]) for i in smollm2.encode("a  5")] == ["a", "  ", "5"]
    for text in DIGITS:
        pieces = [smollm2.decode([i]) for i in smollm2.encode(text)]
        assert all(len(piece) == 1 for piece in pieces if any(c in "0123456789" for c in piece))
        assert "".join(smollm2.decode(smollm2.encode(text))) == text


def test_the_built_in_model_adds_no_begin_token(smollm2: Tokenizer) -> None:
    assert smollm2.encode("hello") == smollm2.encode("hello", add_special_tokens=False)
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49152)


def test_texts_without_digits_and_conversations_are_those_of_transformers_own_conversion(
    smollm2: Tokenizer, smollm2_gguf: Path
) -> None:
    oracle = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    for text in TEXTS:
        ids = oracle.encode(text)
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    for messages in CONVERSATIONS:
        wanted = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert smollm2.render_chat(messages) == wanted


def write_vocabulary(path: Path, kind: str, rule: str, *, add_bos: bool = False) -> None:
    backend = json.loads(train(byte_fallback=False).to_str())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(rule)
    tokens = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if i < 5 else gguf.TokenType.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_begin_token_is_added_if_the_gguf_file_says_so(tmp_path: Path, add_bos: bool) -> None:
    write_vocabulary(tmp_path / "m.gguf", "gpt2", "smollm", add_bos=add_bos)
    tokenizer = loaded(tmp_path / "m.gguf")
    body = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([1, *body] if add_bos else body)
    assert not tokenizer.has_chat_template
    assert tokenizer.eos_token_ids == ()


@pytest.mark.parametrize(("kind", "rule"), [("gpt2", "llama-bpe"), ("gpt2", "qwen2"), ("llama", "default")])
def test_an_unsupported_gguf_tokenizer_is_refused_by_name(tmp_path: Path, kind: str, rule: str) -> None:
    write_vocabulary(tmp_path / "m.gguf", kind, rule)
    with pytest.raises(ModelRejected, match=f"'{kind}' with pre-tokenizer '{rule}'"):
        load_tokenizer(str(tmp_path / "m.gguf"))


# --- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS + DIGITS)
def test_a_streamed_text_arrives_whole_and_never_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts, rest = streamed(tokenizer, ids)
    assert "".join(parts) + rest == tokenizer.decode(ids)
    assert text.count("\ufffd") == sum(part.count("\ufffd") for part in [*parts, rest])


@given(seed=st.integers(0, 2**32), length=st.integers(0, 40), skip=st.booleans(), bytes_only=st.booleans())
def test_any_tokens_streamed_make_the_text_that_they_make_at_once(
    tokenizer: Tokenizer, seed: int, length: int, skip: bool, bytes_only: bool
) -> None:
    rng = random.Random(seed)
    # The first 300 ids are special tokens and single bytes: mostly text that is no UTF-8.
    ids = [rng.randrange(300 if bytes_only else tokenizer.vocab_size + 5) for _ in range(length)]
    parts, rest = streamed(tokenizer, ids, skip)
    assert "".join(parts) + rest == tokenizer.decode(ids, skip)


@given(text=st.text(max_size=30))
def test_any_text_streamed_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    parts, rest = streamed(tokenizer, ids)
    assert "".join(parts) + rest == tokenizer.decode(ids)


def test_an_emoji_of_four_tokens_comes_with_its_last_and_a_cut_one_when_flushed(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🦜")
    assert len(ids) > 1
    parts, rest = streamed(smollm2, ids)
    assert (parts, rest) == ([""] * (len(ids) - 1) + ["🦜"], "")
    parts, rest = streamed(smollm2, ids[:-1])
    assert (set(parts), rest) == ({""}, smollm2.decode(ids[:-1]))


def test_a_word_after_a_skipped_token_keeps_its_space() -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "▁hello": 1, "▁world": 2}, unk_token="<s>"))
    backend.decoder = decoders.Metaspace()  # takes the space off whatever word comes first
    backend.add_special_tokens([AddedToken("<s>")])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert streamed(tokenizer, [0, 1, 0, 0, 2]) == (["", "hello", "", "", " world"], "")
    assert tokenizer.decode([0, 1, 0, 0, 2]) == "hello world"


def test_plain_words_are_returned_at_once(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The cat sat on the mat.")
    parts, rest = streamed(smollm2, ids)
    assert parts == [smollm2.decode([i]) for i in ids]
    assert rest == ""
