//! Chat completions: golden transcripts of answers, whole and streamed.

use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use futures::StreamExt;
use serde_json::{Value, json};
use shoal_web::{
    Candidate, ChatMessage, FinishReason, GenerateError, KEEP_ALIVE, TokenCounts, TokenEvent, TokenLogprobs,
    Trace,
};

use crate::fake::{Answer, Front, hello, request, token};

fn ask(extra: Value) -> Value {
    let mut body = json!({"model": "smollm2-135m", "messages": [{"role": "user", "content": "Say hello"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The text of an answer with what differs from run to run replaced.
fn golden(answer: &Answer) -> String {
    let id = answer.header("x-request-id");
    let mut text = answer.body.replace(&format!("chatcmpl-{id}"), "ID");
    while let Some(at) = text.find("\"created\":1") {
        let end = at + text[at..].find(',').unwrap();
        text.replace_range(at..end, "\"created\":0");
    }
    text
}

#[tokio::test]
async fn whole_answer() {
    let front = Front::new();
    let answer = front.chat(ask(json!({}))).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "application/json");
    assert_eq!(
        golden(&answer),
        concat!(
            r#"{"id":"ID","object":"chat.completion","created":0,"model":"smollm2-135m","#,
            r#""choices":[{"index":0,"message":{"role":"assistant","content":"Hello","refusal":null},"#,
            r#""logprobs":null,"finish_reason":"stop"}],"#,
            r#""usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,"#,
            r#""prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}"#
        )
    );
}

#[tokio::test]
async fn streamed_answer() {
    let front = Front::new();
    let answer = front.chat(ask(json!({"stream": true}))).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "text/event-stream");
    assert_eq!(answer.header("cache-control"), "no-cache");
    let head =
        r#"data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"smollm2-135m","choices":"#;
    let rest = r#""logprobs":null,"finish_reason":null}]}"#;
    assert_eq!(
        golden(&answer),
        [
            ": prefill 9".to_owned(),
            format!(r#"{head}[{{"index":0,"delta":{{"role":"assistant","content":""}},{rest}"#),
            format!(r#"{head}[{{"index":0,"delta":{{"content":"Hel"}},{rest}"#),
            format!(r#"{head}[{{"index":0,"delta":{{"content":"lo"}},{rest}"#),
            format!(r#"{head}[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop"}}]}}"#),
            "data: [DONE]".to_owned(),
            String::new(),
        ]
        .join("\n\n")
    );
}

#[tokio::test]
async fn usage_comes_last_and_only_if_asked_for() {
    let front = Front::new();
    let answer = front.chat(ask(json!({"stream": true, "stream_options": {"include_usage": true}}))).await;
    let chunks = chunks(&answer.body);
    let (last, rest) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["total_tokens"], 12);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(rest.iter().all(|chunk| chunk["usage"] == Value::Null && chunk.get("usage").is_some()));
    for key in ["id", "created", "model"] {
        assert!(chunks.iter().all(|chunk| chunk[key] == chunks[0][key]), "{key} stays the same");
    }
}

/// The JSON of all chunks but `[DONE]`.
fn chunks(body: &str) -> Vec<Value> {
    let mut data: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"));
    data.into_iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn trace_comes_if_asked_for() {
    let front = Front::new();
    for stream in [false, true] {
        let trace = Some(Trace { tokens: vec![5, 7], logits_sha256: "ab".repeat(32) });
        let done = |trace| TokenEvent::Done {
            finish_reason: FinishReason::Length,
            counts: TokenCounts { prompt: 2, completion: 2, drafted: 8, accepted: 3, cached: 1 },
            trace,
        };
        front.engine.script(vec![token("x", 5), token("y", 7), done(trace)]);
        let answer =
            front.chat(ask(json!({"stream": stream, "shoal": {"ignore_eos": true, "trace": true}}))).await;
        let seen = front.engine.last();
        assert!(seen.ignore_eos && seen.trace);
        let last = if stream { chunks(&answer.body).pop().unwrap() } else { answer.json() };
        let digest = "ab".repeat(32);
        let expected =
            json!({"tokens": [5, 7], "logits_sha256": digest, "drafted_tokens": 8, "accepted_tokens": 3});
        assert_eq!(last["shoal"], expected);
        assert_eq!(last["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn waiting_is_told_in_comments() {
    let front = Front::new();
    let mut events = vec![
        TokenEvent::Queued { position: 3 },
        TokenEvent::Queued { position: 0 },
        TokenEvent::Loading { done_bytes: 12 << 20, total_bytes: (138 << 20) - 7 },
    ];
    events.extend(hello());
    front.engine.script(events);
    let answer = front.chat(ask(json!({"stream": true}))).await;
    assert!(
        answer.body.starts_with(": queued 3\n\n: queued 0\n\n: loading 12/138 MiB\n\n: prefill 9\n\ndata: "),
        "{}",
        answer.body
    );
}

#[tokio::test(start_paused = true)]
async fn headers_come_before_the_first_token() {
    let front = Front::new();
    let sender = front.engine.live(4);
    let body = ask(json!({"stream": true})).to_string();
    let sent = request("POST", "/v1/chat/completions").body(Body::from(body)).unwrap();
    let (status, headers, mut body) = front.open(sent).await;
    assert_eq!((status, headers["content-type"].to_str().unwrap()), (StatusCode::OK, "text/event-stream"));

    let begun = tokio::time::Instant::now();
    assert_eq!(body.next().await.unwrap().unwrap(), ": waiting\n\n", "silence is broken by comments");
    assert!(begun.elapsed() >= KEEP_ALIVE && begun.elapsed() < KEEP_ALIVE * 2);
    sender.send(token("Hi", 1)).await.unwrap();
    let first = body.next().await.unwrap().unwrap();
    assert!(first.starts_with(b"data: ") && first.ends_with(b"\n\n"));
}

#[tokio::test]
async fn empty_text_is_not_sent() {
    let front = Front::new();
    let mut events = hello();
    events.insert(2, token("", 9));
    front.engine.script(events);
    let answer = front.chat(ask(json!({"stream": true}))).await;
    assert_eq!(chunks(&answer.body).len(), 4);
}

#[tokio::test]
async fn an_answer_without_text_is_proper_too() {
    let front = Front::new();
    front.engine.script(vec![hello().pop().unwrap()]);
    let answer = front.chat(ask(json!({"stream": true}))).await;
    let chunks = chunks(&answer.body);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks[1]["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn failure_mid_stream_is_an_event_and_a_proper_end() {
    let lost = || GenerateError::NodeLost { text: "desk is gone: try again".into(), retry_after_s: 2 };
    let front = Front::new();
    front.engine.script(vec![token("Hel", 1), TokenEvent::Failed(lost())]);
    let answer = front.chat(ask(json!({"stream": true}))).await;
    assert_eq!(answer.status, 200);
    let end = concat!(
        r#"data: {"error":{"message":"desk is gone: try again","type":"server_error","param":null,"#,
        "\"code\":\"node_lost\"}}\n\ndata: [DONE]\n\n"
    );
    assert!(answer.body.ends_with(end), "{}", answer.body);

    // The sender went away without a word: the same, and never an answer that only looks whole.
    front.engine.script(vec![token("Hel", 1)]);
    let answer = front.chat(ask(json!({"stream": true}))).await;
    assert_eq!(chunks(&answer.body).pop().unwrap()["error"]["code"], "internal_error");
}

#[tokio::test]
async fn failure_before_the_first_byte_has_its_status() {
    let cases = [
        (
            GenerateError::NoPlacement { text: "desk lacks 3 MB for it".into(), retry_after_s: 5 },
            503,
            "no_placement",
            "5",
        ),
        (GenerateError::QueueFull { retry_after_s: 3 }, 429, "queue_full", "3"),
        (GenerateError::NodeLost { text: "desk is gone".into(), retry_after_s: 0 }, 503, "node_lost", "1"),
        (GenerateError::Stopped { instance: "smollm2-135m-k3qa".into() }, 404, "instance_stopped", ""),
        (GenerateError::Internal { text: "a bug of ours".into() }, 500, "internal_error", ""),
        (
            GenerateError::Unsupported { param: "top_k".into(), text: "no top_k here".into() },
            400,
            "unsupported_parameter",
            "",
        ),
        (GenerateError::Invalid { param: None, text: "makes no sense".into() }, 400, "invalid_value", ""),
    ];
    for (error, status, code, retry_after) in cases {
        for stream in [false, true] {
            let front = Front::new();
            front.engine.refuse(error.clone());
            let answer = front.chat(ask(json!({"stream": stream}))).await;
            assert_eq!(answer.status, status, "{error:?}");
            assert_eq!(answer.error().0, code);
            assert_eq!(answer.header("retry-after"), retry_after);
        }
        // Nothing of a whole answer has been sent before its end.
        let front = Front::new();
        front.engine.script(vec![token("Hel", 1), TokenEvent::Failed(error)]);
        let answer = front.chat(ask(json!({}))).await;
        assert_eq!((answer.status.as_u16(), answer.error().0.as_str()), (status, code));
    }
}

#[tokio::test]
async fn dropping_the_answer_cancels() {
    let front = Front::new();
    let sender = front.engine.live(4);
    let body = ask(json!({"stream": true})).to_string();
    let sent = request("POST", "/v1/chat/completions").body(Body::from(body)).unwrap();
    let (_, _, mut body) = front.open(sent).await;
    sender.send(token("Hi", 1)).await.unwrap();
    body.next().await.unwrap().unwrap();
    drop(body);
    tokio::time::timeout(Duration::from_secs(10), sender.closed()).await.unwrap();
}

#[tokio::test]
async fn a_client_that_does_not_read_is_not_buffered_for() {
    let front = Front::new();
    let sender = front.engine.live(8);
    let body = ask(json!({"stream": true})).to_string();
    let sent = request("POST", "/v1/chat/completions").body(Body::from(body)).unwrap();
    let (_, _, body) = front.open(sent).await;
    let mut accepted = 0;
    while sender.try_send(token("x", accepted)).is_ok() {
        accepted += 1;
        tokio::task::yield_now().await;
    }
    assert_eq!(accepted, 8, "nothing is taken that the client has not asked for");
    drop(body);
}

#[tokio::test]
async fn what_is_honoured_reaches_the_engine() {
    let front = Front::new();
    let answer = front
        .chat(json!({
            "model": "smollm2-135m",
            "messages": [
                {"role": "developer", "content": "Be brief.", "name": "ops"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": "ok", "tool_calls": [], "reasoning_content": "hm"},
                {"role": "user", "content": ""},
            ],
            "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 40, "seed": -1,
            "stop": ["a", "b"], "stream": false,
        }))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let seen = front.engine.last();
    let message = |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
    assert_eq!(
        seen.messages,
        [
            message("system", "Be brief."),
            message("user", "one\ntwo"),
            message("assistant", "ok"),
            message("user", "")
        ]
    );
    assert_eq!(
        (seen.max_tokens, seen.temperature, seen.top_p, seen.top_k),
        (Some(7), Some(0.0), Some(0.5), Some(40))
    );
    assert_eq!((seen.seed, seen.stop.as_slice()), (Some(u64::MAX), &["a".to_owned(), "b".to_owned()][..]));

    front.chat(ask(json!({"stop": "end", "top_k": -1, "max_tokens": 5}))).await;
    let seen = front.engine.last();
    assert_eq!(
        (seen.stop.as_slice(), seen.top_k, seen.max_tokens),
        (&["end".to_owned()][..], Some(0), Some(5))
    );

    front.chat(ask(json!({}))).await;
    let seen = front.engine.last();
    assert_eq!(
        (seen.max_tokens, seen.temperature, seen.top_p, seen.top_k, seen.seed),
        (None, None, None, None, None)
    );
    assert!(seen.stop.is_empty() && !seen.ignore_eos && !seen.trace && seen.speculate && seen.reuse);
    assert_eq!(
        (seen.min_p, seen.typical_p, seen.repetition_penalty, seen.logprobs),
        (None, None, None, None)
    );
    assert!(seen.presence_penalty == 0.0 && seen.frequency_penalty == 0.0 && seen.logit_bias.is_empty());

    front
        .chat(ask(json!({
            "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 2,
            "logit_bias": {"50256": -100, "7": 1.5}, "logprobs": true, "top_logprobs": 20,
            "shoal": {"speculate": false, "reuse": false},
        })))
        .await;
    let seen = front.engine.last();
    assert_eq!((seen.min_p, seen.typical_p, seen.repetition_penalty), (Some(0.05), Some(0.9), Some(1.1)));
    assert_eq!((seen.presence_penalty, seen.frequency_penalty), (-2.0, 2.0));
    assert_eq!((seen.logit_bias.as_slice(), seen.logprobs), (&[(7, 1.5), (50256, -100.0)][..], Some(20)));
    assert!(!seen.speculate && !seen.reuse);
    front.chat(ask(json!({"logprobs": true}))).await;
    assert_eq!(front.engine.last().logprobs, Some(0));
}

fn with_logprobs(text: &str, bytes: &[u8], logprob: f32) -> TokenEvent {
    let chosen = Candidate { bytes: bytes.into(), logprob };
    let top = vec![chosen.clone(), Candidate { bytes: b" x".into(), logprob: -3.0 }];
    TokenEvent::Token { text: text.into(), id: 1, logprobs: Some(TokenLogprobs { chosen, top }) }
}

#[tokio::test]
async fn logprobs_come_with_their_tokens() {
    let events = || {
        let done = hello().pop().unwrap();
        vec![with_logprobs("", b"\xC3", -0.5), with_logprobs("\u{e4}", b"\xA4", -0.25), done]
    };
    let entry = |token: &str, logprob: f64, bytes: &[u8]| {
        let other = json!({"token": " x", "logprob": -3.0, "bytes": [32, 120]});
        let first = json!({"token": token, "logprob": logprob, "bytes": bytes});
        json!({"token": token, "logprob": logprob, "bytes": bytes, "top_logprobs": [first, other]})
    };
    let expected = [entry("\u{fffd}", -0.5, b"\xC3"), entry("\u{fffd}", -0.25, b"\xA4")];
    let front = Front::new();
    front.engine.script(events());
    let answer = front.chat(ask(json!({"logprobs": true, "top_logprobs": 2}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "\u{e4}");
    assert_eq!(answer["choices"][0]["logprobs"], json!({"content": expected, "refusal": null}));

    front.engine.script(events());
    let answer = front.chat(ask(json!({"stream": true, "logprobs": true, "top_logprobs": 2}))).await;
    let chunks = chunks(&answer.body);
    assert_eq!(chunks.len(), 4);
    for (chunk, entry) in chunks[1..3].iter().zip(expected) {
        assert_eq!(chunk["choices"][0]["logprobs"], json!({"content": [entry], "refusal": null}));
    }
    assert_eq!(chunks[3]["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn several_choices_are_requests_of_their_own_and_one_answer() {
    let counts = |completion| TokenCounts { prompt: 9, cached: 4, completion, ..TokenCounts::default() };
    let done = |finish_reason, completion| TokenEvent::Done {
        finish_reason,
        counts: counts(completion),
        trace: None,
    };
    let script = |front: &Front| {
        front.engine.script(vec![token("Hel", 1), token("lo", 2), done(FinishReason::Stop, 3)]);
        front.engine.script(vec![token("Good day", 3), done(FinishReason::Length, 1)]);
    };
    let front = Front::new();
    script(&front);
    let answer = front.chat(ask(json!({"n": 2, "seed": 7}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello");
    assert_eq!(answer["choices"][1]["message"]["content"], "Good day");
    assert_eq!(
        (&answer["choices"][1]["index"], &answer["choices"][1]["finish_reason"]),
        (&json!(1), &json!("length"))
    );
    let usage = json!({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 0}});
    assert_eq!(answer["usage"], usage);
    {
        let seen = front.engine.seen.lock().unwrap();
        assert_eq!((seen[0].seed, seen[1].seed), (Some(7), Some(8)), "each has a seed of its own");
        assert_eq!(seen[1].model, "smollm2-135m-k3qa", "the others go where the first one is");
        assert_ne!(seen[0].id, seen[1].id);
    }

    script(&front);
    let options = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
    let chunks = chunks(&front.chat(ask(options)).await.body);
    let of = |index: u64| -> Vec<&Value> {
        let choices = chunks.iter().filter_map(|chunk| chunk["choices"].get(0));
        choices.filter(|choice| choice["index"] == index).collect()
    };
    for (index, text, reason) in [(0, "Hello", "stop"), (1, "Good day", "length")] {
        let choices = of(index);
        assert_eq!(choices[0]["delta"]["role"], "assistant");
        let said: String = choices.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!((said.as_str(), &choices.last().unwrap()["finish_reason"]), (text, &json!(reason)));
    }
    assert_eq!(chunks.last().unwrap()["usage"], usage);

    // One that is refused refuses all; one that fails ends all.
    front.engine.script(hello());
    front.engine.refuse(GenerateError::QueueFull { retry_after_s: 3 });
    let answer = front.chat(ask(json!({"n": 2}))).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (429, "3"));
    front.engine.script(hello());
    front.engine.script(vec![
        token("x", 1),
        TokenEvent::Failed(GenerateError::Internal { text: "broke down".into() }),
    ]);
    assert_eq!(front.chat(ask(json!({"n": 2}))).await.status, 500);
}

#[tokio::test]
async fn unknown_fields_and_neutral_values_are_ignored() {
    let front = Front::new();
    let answer = front
        .chat(ask(json!({
            "user": "me", "store": true, "metadata": {"a": "b"}, "prompt_cache_key": "k", "service_tier": "auto",
            "prediction": {"type": "content", "content": "x"}, "reasoning_effort": "low", "made_up": [1, {"x": null}],
            "tools": [], "tool_choice": "auto", "parallel_tool_calls": true, "functions": null,
            "response_format": {"type": "text"}, "logprobs": false, "top_logprobs": 0, "logit_bias": {},
            "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_p": 0, "n": 1,
            "modalities": ["text"], "audio": null, "stop": null, "max_tokens": null, "temperature": null,
            "stream_options": null, "shoal": null, "seed": null,
        })))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}
