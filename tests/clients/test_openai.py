"""The openai package for Python, as people use it, against a real node."""

import time

import openai
import pytest
from agent import MODEL, wait_for

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="session")
def client(agent):
    return openai.OpenAI(base_url=f"{agent.url}/v1", api_key="any", max_retries=0, timeout=120)


def test_models_are_listed(client):
    models = {model.id: model for model in client.models.list()}
    assert MODEL in models
    assert models[MODEL].object == "model"
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=64)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens > 3


def test_a_streamed_answer_is_the_same_and_comes_in_pieces(client):
    options = dict(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=64)
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(text) == whole.choices[0].message.content
    assert len(text) >= whole.usage.completion_tokens // 2
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_max_tokens_and_stop_end_an_answer(client):
    short = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
    stopped = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=64, stop=["Paris"]
    )
    assert "Paris" not in stopped.choices[0].message.content
    assert stopped.choices[0].finish_reason == "stop"


def test_a_seed_repeats_an_answer(client):
    options = dict(model=MODEL, messages=CAPITAL, temperature=1.5, max_tokens=24, seed=7)
    texts = [client.chat.completions.create(**options).choices[0].message.content for _ in range(2)]
    assert texts[0] == texts[1]


def test_messages_may_be_parts_and_have_a_system_prompt(client):
    messages = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France? Answer in one sentence."}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content


def test_an_unknown_model_names_those_that_are_served(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="nobody", messages=CAPITAL)
    assert error.value.code == "model_not_found"
    assert MODEL in error.value.message and "shoal serve" in error.value.message


def test_a_field_that_cannot_be_honoured_is_named(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for param, value in [("tools", tools), ("n", 2), ("logprobs", True), ("presence_penalty", 1.0)]:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=MODEL, messages=CAPITAL, **{param: value})
        assert error.value.code == "unsupported_parameter" and error.value.param == param
    neutral = dict(n=1, presence_penalty=0, frequency_penalty=0, logprobs=False, response_format={"type": "text"})
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=2, **neutral)
    assert answer.choices


def test_a_prompt_longer_than_the_context(client):
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=long)
    assert error.value.code == "context_length_exceeded"


def test_bad_messages(client):
    for messages in ([], [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 7}]):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=messages)


def test_closing_a_stream_frees_its_slot(agent, client):
    stream = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, max_tokens=900, stream=True, extra_body={"shoal": {"ignore_eos": True}}
    )
    next(iter(stream))
    stream.close()

    def idle():
        assert agent.active() == 0

    wait_for("the slot is free", idle, promise_s=1)


def test_many_at_once(client):
    """More requests than slots: the rest wait their turn, and all are answered alike."""
    import concurrent.futures

    def ask(_):
        start = time.monotonic()
        answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16)
        return answer.choices[0].message.content, time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert len({text for text, _ in answers}) == 1
