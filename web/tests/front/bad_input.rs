//! One test for each kind of bad input: a message that names the cause and the way out, the right status, and nobody
//! else harmed.

use axum::body::Body;
use serde_json::{Value, json};
use shoal_web::{GenerateError, MAX_BODY_BYTES};

use crate::fake::{Front, request};

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

/// The request is refused with this status, code and field, the engine never sees it, and the next one is answered.
async fn refused(body: impl ToString, status: u16, code: &str, param: &str) -> String {
    let front = Front::new();
    let body = body.to_string();
    let answer = front.post("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, status, "{body}: {}", answer.body);
    assert_eq!(answer.error(), (code.to_owned(), param.to_owned()), "{body}");
    assert!(front.engine.seen.lock().unwrap().is_empty());
    assert_eq!(front.chat(json!({"model": "m", "messages": user("hi")})).await.status, 200);
    answer.json()["error"]["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn malformed_json() {
    let message = refused(r#"{"model": "m", "messages": ["#, 400, "invalid_json", "").await;
    assert!(message.contains("line 1"), "{message}");
    refused("", 400, "invalid_json", "").await;
    refused("\u{0}\u{1}", 400, "invalid_json", "").await;
    refused("[".repeat(10_000), 400, "invalid_json", "").await;
}

#[tokio::test]
async fn wrong_types() {
    refused("[]", 400, "invalid_value", "").await;
    refused(json!({"messages": user("hi")}), 400, "invalid_value", "model").await;
    refused(json!({"model": 7, "messages": user("hi")}), 400, "invalid_value", "model").await;
    refused(json!({"model": "m"}), 400, "invalid_value", "messages").await;
    refused(json!({"model": "m", "messages": "hi"}), 400, "invalid_value", "messages").await;
    refused(json!({"model": "m", "messages": ["hi"]}), 400, "invalid_value", "messages[0]").await;
    refused(json!({"model": "m", "messages": [{"content": "hi"}]}), 400, "invalid_value", "messages[0].role")
        .await;
    refused(
        json!({"model": "m", "messages": [{"role": "user"}]}),
        400,
        "invalid_value",
        "messages[0].content",
    )
    .await;
    let content = |content: Value| json!({"model": "m", "messages": [{"role": "user", "content": content}]});
    refused(content(json!(7)), 400, "invalid_value", "messages[0].content").await;
    refused(content(json!([])), 400, "invalid_value", "messages[0].content").await;
    refused(content(json!(["hi"])), 400, "invalid_value", "messages[0].content[0]").await;
    refused(content(json!([{"type": "text"}])), 400, "invalid_value", "messages[0].content[0].text").await;
    for (param, value) in [
        ("max_tokens", json!("7")),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(1.5)),
        ("max_completion_tokens", json!(-1)),
        ("temperature", json!("hot")),
        ("temperature", json!(2.1)),
        ("temperature", json!(-0.1)),
        ("top_p", json!(1.1)),
        ("top_p", json!([])),
        ("top_k", json!(-2)),
        ("seed", json!(0.5)),
        ("seed", json!("s")),
        ("stop", json!(7)),
        ("stop", json!(vec!["x"; 17])),
        ("stream", json!("yes")),
        ("stream_options", json!(true)),
        ("shoal", json!([])),
        ("n", json!(0)),
        ("n", json!(9)),
        ("n", json!(1.5)),
        ("logprobs", json!(5)),
        ("top_logprobs", json!(5)),
        ("top_logprobs", json!(21)),
        ("logit_bias", json!([1])),
        ("presence_penalty", json!(2.1)),
        ("frequency_penalty", json!(-2.5)),
        ("repetition_penalty", json!(0)),
        ("repetition_penalty", json!(11)),
        ("min_p", json!(1.5)),
        ("typical_p", json!(-0.1)),
    ] {
        refused(json!({"model": "m", "messages": user("hi"), param: value}), 400, "invalid_value", param)
            .await;
    }
    for (param, value) in [
        ("stop[1]", json!({"stop": ["x", ""]})),
        ("stop[0]", json!({"stop": ["x".repeat(257)]})),
        ("stop[0]", json!({"stop": [1]})),
        ("stream_options.include_usage", json!({"stream_options": {"include_usage": 1}})),
        ("shoal.trace", json!({"shoal": {"trace": "yes"}})),
        ("shoal.trace", json!({"shoal": {"trace": true}, "n": 2})),
        ("shoal.speculate", json!({"shoal": {"speculate": 1}})),
        ("logit_bias.x", json!({"logit_bias": {"x": 1}})),
        ("logit_bias.-1", json!({"logit_bias": {"-1": 1}})),
        ("logit_bias.5", json!({"logit_bias": {"5": 101}})),
        ("logit_bias.5", json!({"logit_bias": {"5": "1"}})),
        (
            "logit_bias",
            json!({"logit_bias": (0..1025).map(|i| (i.to_string(), 1)).collect::<std::collections::BTreeMap<_, _>>()}),
        ),
    ] {
        let mut body = json!({"model": "m", "messages": user("hi")});
        body.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        refused(body, 400, "invalid_value", param).await;
    }
}

#[tokio::test]
async fn unknown_role() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "robot", "content": "hi"}]});
    let message = refused(body, 400, "invalid_value", "messages[1].role").await;
    assert!(message.contains("robot") && message.contains("assistant"), "{message}");
}

#[tokio::test]
async fn empty_messages() {
    let message = refused(json!({"model": "m", "messages": []}), 400, "invalid_value", "messages").await;
    assert!(message.contains("at least one"), "{message}");
}

#[tokio::test]
async fn known_field_that_cannot_be_honoured() {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    for (param, value) in [
        ("tools", json!([tool])),
        ("functions", json!([{"name": "f"}])),
        ("tool_choice", json!("required")),
        ("tool_choice", json!({"type": "function", "function": {"name": "f"}})),
        ("response_format", json!({"type": "json_object"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {}})),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "alloy"})),
        ("web_search_options", json!({})),
    ] {
        let body = json!({"model": "m", "messages": user("hi"), param: value});
        refused(body, 400, "unsupported_parameter", param).await;
    }
    let messages = |message: Value| json!({"model": "m", "messages": [message]});
    for (param, message) in [
        ("messages[0].role", json!({"role": "tool", "content": "7", "tool_call_id": "c"})),
        ("messages[0].tool_calls", json!({"role": "assistant", "content": null, "tool_calls": [tool]})),
        (
            "messages[0].content[0].type",
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}),
        ),
    ] {
        refused(messages(message), 400, "unsupported_parameter", param).await;
    }
}

#[tokio::test]
async fn context_exceeded() {
    for stream in [false, true] {
        let front = Front::new();
        front.engine.refuse(GenerateError::ContextLengthExceeded {
            prompt_tokens: 5000,
            at_least: false,
            context: 4096,
        });
        let answer =
            front.chat(json!({"model": "m", "stream": stream, "messages": user("a long one")})).await;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.error(), ("context_length_exceeded".into(), "messages".into()));
        let message = answer.json()["error"]["message"].to_string();
        assert!(
            message.contains("has 5000") && message.contains("4096") && message.contains("--context"),
            "{message}"
        );
        let far = GenerateError::ContextLengthExceeded { prompt_tokens: 5000, at_least: true, context: 4096 };
        front.engine.refuse(far);
        let answer = front.chat(json!({"model": "m", "messages": user("a very long one")})).await;
        assert!(answer.body.contains("has at least 5000 tokens"), "{}", answer.body);
    }
}

#[tokio::test]
async fn unknown_model() {
    for stream in [false, true] {
        let front = Front::new();
        let error =
            GenerateError::ModelNotFound { model: "gpt-x".into(), served: vec!["smollm2-135m".into()] };
        front.engine.refuse(error);
        let answer = front.chat(json!({"model": "gpt-x", "stream": stream, "messages": user("hi")})).await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.error(), ("model_not_found".into(), "model".into()));
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains("smollm2-135m") && message.contains("shoal serve gpt-x"), "{message}");
    }
}

#[tokio::test]
async fn wrong_content_type() {
    let front = Front::new();
    for kind in
        [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("application/jsonp")]
    {
        for path in ["/v1/chat/completions", "/api/v1/instances"] {
            let mut builder =
                axum::http::Request::builder().method("POST").uri(path).header("host", "localhost");
            if let Some(kind) = kind {
                builder = builder.header("content-type", kind);
            }
            let body = json!({"model": "m", "messages": user("hi")}).to_string();
            let answer = front.send(builder.body(Body::from(body)).unwrap()).await;
            assert_eq!(answer.status, 415, "{path} {kind:?}");
            assert_eq!(answer.json()["error"]["code"], "unsupported_media_type");
            assert!(answer.body.contains("application/json"));
        }
    }
    assert!(front.engine.seen.lock().unwrap().is_empty() && front.swarm.asked.lock().unwrap().is_empty());
    let answer = front
        .send(
            axum::http::Request::builder()
                .method("POST")
                .uri("/v1/chat/completions")
                .header("host", "localhost")
                .header("content-type", "Application/JSON; charset=utf-8")
                .body(Body::from(json!({"model": "m", "messages": user("hi")}).to_string()))
                .unwrap(),
        )
        .await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn foreign_host() {
    let front = Front::new();
    for (path, host) in [
        ("/api/v1/swarm", "evil.example"),
        ("/v1/models", "evil.example:7711"),
        ("/", "127.0.0.1.evil.example"),
        ("/health", ""),
    ] {
        let request =
            axum::http::Request::builder().uri(path).header("host", host).body(Body::empty()).unwrap();
        let answer = front.send(request).await;
        assert_eq!(answer.status, 403, "{path} {host}");
        assert_eq!(answer.json()["error"]["code"], "host_not_allowed");
    }
    let absolute = request("GET", "http://evil.example/api/v1/swarm").body(Body::empty()).unwrap();
    assert_eq!(front.send(absolute).await.status, 403);
    let twice = request("GET", "/health").header("host", "evil.example").body(Body::empty()).unwrap();
    assert_eq!(front.send(twice).await.status, 403);
}

#[tokio::test]
async fn foreign_origin() {
    let front = Front::new();
    for origin in ["http://evil.example", "null", "http://127.0.0.1:7712", "https://localhost"] {
        for (method, path) in
            [("GET", "/api/v1/swarm"), ("POST", "/v1/chat/completions"), ("OPTIONS", "/v1/models")]
        {
            let answer = front
                .send(
                    request(method, path)
                        .header("origin", origin)
                        .header("access-control-request-method", "POST")
                        .body(Body::from("{}"))
                        .unwrap(),
                )
                .await;
            assert_eq!(answer.status, 403, "{origin} {path}");
            assert_eq!(answer.json()["error"]["code"], "origin_not_allowed");
            assert_eq!(answer.header("access-control-allow-origin"), "");
        }
    }
}

#[tokio::test]
async fn body_too_large() {
    let large = format!(r#"{{"model": "m", "messages": "{}"}}"#, "x".repeat(MAX_BODY_BYTES));
    let message = refused(&large, 413, "body_too_large", "").await;
    assert!(message.contains("16 MiB"), "{message}");
    let front = Front::new();
    let answer = front.post("/api/v1/plan", &large).await;
    assert_eq!(
        (answer.status.as_u16(), answer.json()["error"]["code"].as_str()),
        (413, Some("body_too_large"))
    );
    let full = json!({"model": "m", "messages": user(&"x".repeat(MAX_BODY_BYTES - 100))});
    assert_eq!(front.chat(full).await.status, 200);
}
