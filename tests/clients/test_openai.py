"""The openai package for Python, as people use it, against a real node."""

import math
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
    for param, value in [("tools", tools), ("response_format", {"type": "json_object"})]:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=MODEL, messages=CAPITAL, **{param: value})
        assert error.value.code == "unsupported_parameter" and error.value.param == param
    neutral = dict(n=1, presence_penalty=0, frequency_penalty=0, logprobs=False, response_format={"type": "text"})
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=2, **neutral)
    assert answer.choices


def test_logprobs_are_probabilities_of_the_tokens_that_came(client):
    options = dict(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24, logprobs=True, top_logprobs=5)
    choice = client.chat.completions.create(**options).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 5
        # A greedy token is the likeliest.
        assert token.top_logprobs[0].token == token.token and token.top_logprobs[0].logprob == token.logprob
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0001
    chunks = client.chat.completions.create(stream=True, **options)
    streamed = [c.choices[0].logprobs.content[0] for c in chunks if c.choices and c.choices[0].logprobs]
    assert streamed == tokens


def test_a_bias_can_ban_and_force_a_token(client):
    options = dict(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=1)
    plain = client.chat.completions.create(logprobs=True, top_logprobs=1, **options).choices[0].message.content
    forced = client.chat.completions.create(logit_bias={"260": 100}, **options).choices[0].message.content
    assert forced != plain
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(logit_bias={"4000000": 1}, **options)
    assert error.value.param == "logit_bias" and "4000000" in error.value.message


def test_penalties_and_the_common_extensions(client):
    repeat = [{"role": "user", "content": "Say the word yes again and again."}]
    options = dict(model=MODEL, messages=repeat, temperature=0, max_tokens=40)
    extra = {"repetition_penalty": 1.3, "min_p": 0.05, "typical_p": 0.95, "top_k": 40}
    plain = client.chat.completions.create(**options).choices[0].message.content
    varied = client.chat.completions.create(presence_penalty=1.5, frequency_penalty=1.5, extra_body=extra, **options)
    assert varied.choices[0].message.content != plain
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(presence_penalty=2.5, **options)
    assert error.value.param == "presence_penalty"


def test_several_choices_share_a_prompt(client):
    options = dict(model=MODEL, messages=CAPITAL, temperature=1.2, max_tokens=12, seed=3, n=8)
    answer = client.chat.completions.create(**options)
    assert [choice.index for choice in answer.choices] == list(range(8))
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    one = client.chat.completions.create(**{**options, "n": 1})
    assert one.choices[0].message.content == texts[0]
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens > 8
    streamed = [""] * 8
    reasons = [None] * 8
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert streamed == texts and all(reasons)


def test_a_prompt_that_was_there_before_is_not_computed_again(client):
    messages = [{"role": "user", "content": "Tell me about " + "the sea and " * 60 + "the sky."}]
    options = dict(model=MODEL, messages=messages, temperature=0, max_tokens=4)
    client.chat.completions.create(**options)
    usage = client.chat.completions.create(**options).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


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
