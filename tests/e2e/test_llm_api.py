"""`LLM` as its users meet it: forms of prompts, faults named one by one, and an engine that answers after each."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from interleaf import LLM, FinishReason, SamplingParams
from interleaf.errors import (
    AdapterNameTaken,
    AdapterNotFound,
    AdapterRejected,
    CheckpointError,
    ConfigError,
    EngineDead,
    InterleafError,
    PoolTooSmall,
    RequestRejected,
)
from tests.support.peft_adapters import recipes, save_adapter
from tests.support.tiny_models import VOCAB, make_model, save_model

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
DUMMY = "dummy:r=4,targets=all,seed={}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, memory="8MiB", seed=0, adapters={"a": DUMMY.format(1), "b": DUMMY.format(2)}) as llm:
        yield llm


@pytest.fixture(scope="module")
def chat(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, memory="512MiB") as llm:
        yield llm


@pytest.fixture(autouse=True)
def engine_answers_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the shared engine, a base request is answered and no page of KV is left."""
    yield
    if "llm" in request.fixturenames:
        llm: LLM = request.getfixturevalue("llm")
        assert len(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 5
        assert llm.stats().pool.kv_pages == 0
        llm.parts.allocator.check()


# ---------------------------------------------------------------- prompts, params, adapters in their forms


def test_one_prompt_or_a_list_of_them_and_one_adapter_or_one_each(llm: LLM) -> None:
    alone = llm.generate([1, 2, 3], GREEDY, "a")
    listed = llm.generate([[1, 2, 3], [4, 5]], GREEDY, adapter=["a", None])
    assert len(alone) == 1
    assert [o.adapter for o in listed] == ["a", None]
    assert alone[0].outputs == listed[0].outputs
    assert listed[0].prompt_token_ids == (1, 2, 3)


def test_params_may_differ_between_prompts(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, n=2)]
    outputs = llm.generate([[1], [1]], params)
    assert [[len(c.token_ids) for c in o.outputs] for o in outputs] == [[5], [2, 2]]
    assert all(c.finish_reason is FinishReason.LENGTH for o in outputs for c in o.outputs)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_n_sequences_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=8, seed=7, ignore_eos=True)
    first, again = (llm.generate([1, 2], params, "a")[0] for _ in range(2))
    assert first == again
    assert len({c.token_ids for c in first.outputs}) > 1
    beside = llm.generate([[9], [1, 2], [3]], [GREEDY, params, GREEDY], ["b", "a", None])[1]
    assert beside.outputs == first.outputs, "the neighbours do not matter"


def test_a_stop_token_ends_the_sequence_and_is_named(llm: LLM) -> None:
    tokens = llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    stop = tokens[2]
    at = tokens.index(stop)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, stop_token_ids=[stop])
    ended = llm.generate([1, 2, 3], params)[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (tokens[: at + 1], FinishReason.STOP, stop)


def test_texts_messages_and_token_ids_are_prompts(chat: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    params = SamplingParams(max_tokens=6, temperature=0)
    text, talk, several = (
        chat.generate("The sky is", params)[0],
        chat.generate(messages, params)[0],
        chat.generate(["The sky is", messages], params),
    )
    assert [o.outputs[0].text for o in several] == [text.outputs[0].text, talk.outputs[0].text]
    assert text.prompt == "The sky is"
    assert chat.tokenizer is not None
    assert talk.prompt_token_ids == tuple(chat.tokenizer.apply_chat(messages))
    assert text.outputs[0].text == chat.tokenizer.decode(text.outputs[0].token_ids)


def test_a_stop_string_cuts_the_text_and_frees_the_sequence(chat: LLM) -> None:
    free = chat.generate("1, 2, 3, 4,", SamplingParams(max_tokens=24, temperature=0))[0].outputs[0]
    stop = free.text[5:8]
    cut = chat.generate("1, 2, 3, 4,", SamplingParams(max_tokens=24, temperature=0, stop=[stop]))[0].outputs[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
    assert len(cut.token_ids) < len(free.token_ids)
    assert chat.stats().pool.kv_pages == 0


# ---------------------------------------------------------------- requests that are refused


@pytest.mark.parametrize(
    ("prompts", "params", "adapter", "message"),
    [
        ([[1, 2], []], GREEDY, None, r"prompt 1: the prompt has no tokens"),
        ([[1, VOCAB]], GREEDY, None, rf"token id {VOCAB} is not from 0 to {VOCAB - 1}"),
        ([[1, -1]], GREEDY, None, r"token id -1 is not"),
        ([[1, 2.5]], GREEDY, None, r"token id 2.5 is not"),
        ([[1, True]], GREEDY, None, r"token id True is not"),
        ([[1] * 252], GREEDY, None, r"252 tokens \+ max_tokens=5 is over the limit of max_model_len=256"),
        ([[1]], SamplingParams(max_tokens=256), None, r"1 tokens \+ max_tokens=256 is over the limit"),
        ([[1]], SamplingParams(stop_token_ids=[VOCAB]), None, rf"stop_token_ids: token id {VOCAB}"),
        (["text"], GREEDY, None, r"no tokenizer: give prompts as lists of token ids"),
        ([[1]], SamplingParams(stop=["x"]), None, r"stop strings need a tokenizer"),
        (17, GREEDY, None, r"prompts must be .*, got 17"),
        ([[1], 17], GREEDY, None, r"prompt 1 must be .*, got 17"),
        ([[1], [2]], [GREEDY], None, r"params: 1 given for 2 prompts"),
        ([[1], [2]], GREEDY, ["a"], r"adapter: 1 given for 2 prompts"),
        ([[1]], GREEDY, 5, r"adapter must be one value or a list"),
        ([[1]], "hot", None, r"params must be one value or a list"),
        ([[1]], [], None, r"params: 0 given for 1 prompts"),
        ([[1]], {}, None, r"params must be one value or a list"),
        (b"text", GREEDY, None, r"prompts must be .*, got b'text'"),
        ([b"text"], GREEDY, None, r"prompt 0 must be .*, got b'text'"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    llm: LLM, prompts: object, params: object, adapter: object, message: str
) -> None:
    before = llm.stats()
    with pytest.raises(RequestRejected, match=message):
        llm.generate(prompts, params, adapter)  # type: ignore[arg-type]
    assert llm.stats() == before


def test_the_longest_allowed_request_is_served(llm: LLM) -> None:
    assert len(llm.generate([1] * 251, GREEDY, "a")[0].outputs[0].token_ids) == 5


def test_an_unknown_adapter_is_not_the_base_model(llm: LLM) -> None:
    steps = llm.stats().steps
    with pytest.raises(AdapterNotFound, match="no adapter named 'c' is registered"):
        llm.generate([[1], [2]], GREEDY, ["a", "c"])
    assert llm.stats().steps == steps


def test_one_bad_prompt_starts_none_of_the_others(llm: LLM) -> None:
    steps = llm.stats().steps
    with pytest.raises(RequestRejected):
        llm.generate([[1], [2], [VOCAB + 5]], GREEDY)
    assert llm.stats().steps == steps


def generate_again_and_again(llm: LLM) -> None:
    for _ in range(1000):
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=200, ignore_eos=True), ["a", None])


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT as an interactive Python has it: a program started in the background begins with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
def test_ctrl_c_at_any_moment_leaves_an_engine_that_answers(folder: Path, overlap: bool, delay_s: float) -> None:
    with LLM(folder, memory="8MiB", seed=0, overlap=overlap, adapters={"a": DUMMY.format(1)}) as llm:
        expected = llm.generate([1, 2, 3], GREEDY, "a")
        timer = threading.Timer(delay_s, signal.raise_signal, [signal.SIGINT])

        def until_it_strikes() -> None:  # which may be before `start` returns
            timer.start()
            generate_again_and_again(llm)

        with pytest.raises(KeyboardInterrupt):
            until_it_strikes()
        timer.join()
        assert llm.generate([1, 2, 3], GREEDY, "a") == expected
        assert llm.stats().pool.kv_pages == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_closed_engine_refuses_everything(folder: Path) -> None:
    for overlap in (True, False):
        llm = LLM(folder, memory="8MiB", overlap=overlap)
        llm.close()
        llm.close()
        with pytest.raises(EngineDead, match="closed"):
            llm.generate([1], GREEDY)
        with pytest.raises(EngineDead, match="closed"):
            llm.add_adapter("a", DUMMY.format(1))


def test_an_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = iter(range(100))
    poll = llm._client.poll

    def interrupted() -> list[object]:
        if next(polls) == 3:
            raise KeyboardInterrupt
        return poll()  # type: ignore[return-value]

    monkeypatch.setattr(llm._client, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=50, ignore_eos=True), ["a", None])
    assert not llm.parts.engine.has_work


# ---------------------------------------------------------------- adapters come and go


def test_adapters_are_added_and_removed_between_calls(llm: LLM) -> None:
    llm.add_adapter("c", DUMMY.format(3))
    with_c = llm.generate([1, 2, 3], GREEDY, "c")[0]
    pages = llm.stats().pool.adapter_pages
    llm.remove_adapter("c")
    assert llm.stats().pool.adapter_pages < pages, "its pages are free at once"
    with pytest.raises(AdapterNotFound):
        llm.generate([1, 2, 3], GREEDY, "c")
    llm.add_adapter("c", DUMMY.format(3))
    assert llm.generate([1, 2, 3], GREEDY, "c")[0] == with_c
    llm.remove_adapter("c")


def test_a_name_is_not_silently_given_to_another_adapter(llm: LLM) -> None:
    with pytest.raises(AdapterNameTaken, match="'a' is taken"):
        llm.add_adapter("a", DUMMY.format(9))
    llm.add_adapter("a", DUMMY.format(1))
    assert len(llm.parts.store) == 2, "the refused one is not kept"


def test_a_refused_adapter_changes_nothing(llm: LLM, tmp_path: Path) -> None:
    before = llm.stats()
    (tmp_path / "adapter_config.json").write_text("{}")
    for source in (tmp_path, tmp_path / "nowhere", "dummy:r=0", "dummy:rank=3"):
        with pytest.raises(AdapterRejected):
            llm.add_adapter("bad", source)
    with pytest.raises(AdapterRejected, match="a name has"):
        llm.add_adapter("bad name", DUMMY.format(3))
    assert llm.stats() == before
    assert llm.adapters == ("a", "b")


def test_an_adapter_whose_folder_has_vanished_or_changed_fails_its_requests_only(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, memory="8MiB", adapter_host_memory=1, seed=0) as llm:
        recipe = next(iter(recipes(3).values()))
        for seed, name in enumerate(("stays", "vanishes", "changes")):
            llm.add_adapter(name, save_adapter(make_model("llama3"), recipe, tmp_path / name, seed))
        llm.add_adapter("other", DUMMY.format(1))
        shutil.rmtree(tmp_path / "vanishes")
        shutil.rmtree(tmp_path / "changes")
        save_adapter(make_model("llama3"), recipe, tmp_path / "changes", 99)
        names = ["stays", "vanishes", None, "changes", "stays"]
        outputs = llm.generate([[1, 2, 3]] * 5, GREEDY, names)
        assert [o.error is None for o in outputs] == [True, False, True, False, True]
        assert "has changed since it was registered" in str(outputs[3].error)
        assert outputs[0].outputs == outputs[4].outputs
        assert outputs[0].outputs != outputs[2].outputs
        assert llm.stats().pool.kv_pages == 0


def test_contents_under_two_names_live_on_when_one_name_and_its_folder_go(folder: Path, tmp_path: Path) -> None:
    original = save_adapter(make_model("llama3"), next(iter(recipes(3).values())), tmp_path / "a", 1)
    with LLM(folder, memory="8MiB", adapter_host_memory=1, seed=0, adapters={"a": original}) as llm:
        expected = llm.generate([1, 2, 3], GREEDY, "a")[0].outputs
        for first, second in (("b", "a"), ("a", "b")):  # either of the two folders may be the one that stays
            copy = tmp_path / "copy"
            shutil.copytree(original, copy)
            llm.add_adapter("b", copy)
            with pytest.raises(AdapterNameTaken):
                llm.add_adapter("a", DUMMY.format(1))
            gone = copy if first == "b" else original
            llm.remove_adapter(first)
            shutil.move(gone, tmp_path / "away")
            # Another adapter takes the place in host memory, and the pool forgets this one.
            llm.parts.residency.make_room(llm.stats().pool.total_pages)
            llm.add_adapter("other", DUMMY.format(3))
            assert llm.generate([1, 2, 3], GREEDY, second)[0].outputs == expected
            llm.remove_adapter("other")
            shutil.move(tmp_path / "away", gone)
            shutil.rmtree(copy) if first == "b" else None


def test_a_fetch_that_nobody_waits_for_any_more_does_not_hold_up_the_next(folder: Path) -> None:
    names = {name: DUMMY.format(seed) for seed, name in enumerate("abc")}
    with LLM(folder, memory="8MiB", adapter_host_memory=1, seed=0, adapters=names) as llm:
        client = llm._client
        for _ in range(3):
            request = client.submit([1, 2], GREEDY, "a")
            client.poll()
            client.abort(request)
            assert llm.generate([1, 2], GREEDY, "b")[0].error is None


# ---------------------------------------------------------------- engines that do not start


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"memory": "100KiB"},
            PoolTooSmall,
            r"max_model_len=256 tokens needs 16 pages and the pool has 8: .*give at least",
        ),
        ({"memory": "192KiB", "adapters": {"x": "dummy:r=64,targets=all,seed=1"}}, PoolTooSmall, r"adapter 'x' needs"),
        ({"max_model_len": 257}, ConfigError, r"max_model_len=257 is over the model's context of 256"),
        ({"page_tokens": 5}, ConfigError, r"page_tokens must be one of"),
        ({"pagetokens": 4}, ConfigError, r"unknown setting 'pagetokens'; did you mean 'page_tokens'"),
        ({"adapters": {"x": "nowhere"}}, AdapterRejected, "nowhere"),
        ({"adapters": {"x": None}}, AdapterRejected, "x: its source must be a path or a text, got None"),
        ({"adapters": ["x"]}, ConfigError, r"adapters must be a mapping of names to paths, got \['x'\]"),
        ({"memory": "900TiB"}, ConfigError, r"memory=\d+: a pool of \d+ bytes cannot be had on cpu"),
    ],
)
def test_an_engine_that_could_not_serve_does_not_start(
    folder: Path, settings: dict[str, object], error: type[InterleafError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(folder, **settings)  # type: ignore[arg-type]


def test_a_model_folder_with_a_missing_shard_is_refused_and_the_shard_named(tmp_path: Path) -> None:
    model = make_model("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        LLM(tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        LLM(tmp_path)
    with pytest.raises(InterleafError):
        LLM(tmp_path / "nothing-here")
