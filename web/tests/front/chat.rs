//! Chat completions: golden transcripts of answers, whole and streamed.

use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use futures::StreamExt;
use serde_json::{Value, json};
use shoal_web::{ChatMessage, FinishReason, GenerateError, KEEP_ALIVE, TokenEvent, Trace};

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
            prompt_tokens: 2,
            completion_tokens: 2,
            trace,
        };
        front.engine.script(vec![token("x", 5), token("y", 7), done(trace)]);
        let answer =
            front.chat(ask(json!({"stream": stream, "shoal": {"ignore_eos": true, "trace": true}}))).await;
        let seen = front.engine.last();
        assert!(seen.ignore_eos && seen.trace);
        let last = if stream { chunks(&answer.body).pop().unwrap() } else { answer.json() };
        assert_eq!(last["shoal"], json!({"tokens": [5, 7], "logits_sha256": "ab".repeat(32)}));
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
    assert!(seen.stop.is_empty() && !seen.ignore_eos && !seen.trace);
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
