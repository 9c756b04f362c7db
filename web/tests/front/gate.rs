//! Who may come in, and the headers that every answer has.

use axum::body::Body;
use serde_json::json;

use crate::fake::{Front, request};

#[tokio::test]
async fn names_of_this_machine_are_let_in() {
    let front = Front::new();
    for host in ["127.0.0.1:7711", "localhost", "[::1]:7711", "192.168.1.20:7711", "desk:7711", "DESK.local"]
    {
        let request =
            axum::http::Request::builder().uri("/health").header("host", host).body(Body::empty()).unwrap();
        assert_eq!(front.send(request).await.status, 200, "{host}");
    }
}

#[tokio::test]
async fn a_request_without_one_host_is_told_so() {
    let front = Front::new();
    let ask = |hosts: &[&str]| {
        let request = axum::http::Request::builder().uri("/health");
        hosts.iter().fold(request, |request, host| request.header("host", *host)).body(Body::empty()).unwrap()
    };
    for (hosts, said) in
        [(&[][..], "has no Host header"), (&["localhost", "localhost"], "has several Host headers")]
    {
        let answer = front.send(ask(hosts)).await;
        assert_eq!(
            (answer.status.as_u16(), answer.error().0.as_str()),
            (403, "host_not_allowed"),
            "{hosts:?}"
        );
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(said), "{message}");
    }
}

#[tokio::test]
async fn every_answer_has_its_own_id() {
    let front = Front::new();
    let mut ids = std::collections::BTreeSet::new();
    for path in ["/health", "/v1/models", "/nope", "/v1/chat/completions", "/"] {
        ids.insert(front.get(path).await.header("x-request-id").to_owned());
    }
    assert_eq!(ids.len(), 5);
    let answer = front.chat(json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]})).await;
    let id = format!("{:032x}", front.engine.last().id);
    assert_eq!(
        answer.header("x-request-id"),
        id,
        "the engine and the client know the request by the same id"
    );
    assert_eq!(answer.json()["id"], format!("chatcmpl-{id}"));
}

#[tokio::test]
async fn preflight_of_an_allowed_origin() {
    let front = Front::new();
    for origin in ["http://localhost:3000", "http://127.0.0.1:7711"] {
        let preflight = request("OPTIONS", "/v1/chat/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization, content-type, x-stainless-os")
            .body(Body::empty())
            .unwrap();
        let answer = front.send(preflight).await;
        assert_eq!(answer.status, 204);
        assert_eq!(answer.header("access-control-allow-origin"), origin);
        assert_eq!(answer.header("access-control-allow-methods"), "GET, POST, DELETE");
        let allowed = answer.header("access-control-allow-headers");
        for header in ["authorization", "content-type", "x-stainless-os"] {
            assert!(allowed.split(", ").any(|one| one == header), "{header} is not in {allowed}");
        }
    }
    let get =
        request("GET", "/v1/models").header("origin", "http://localhost:3000").body(Body::empty()).unwrap();
    let answer = front.send(get).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), "http://localhost:3000");
    assert!(answer.header("access-control-expose-headers").contains("x-request-id"));
}

#[tokio::test]
async fn any_key_is_accepted() {
    let front = Front::new();
    for (name, value) in [("authorization", "Bearer anything"), ("x-api-key", "anything")] {
        let request = request("GET", "/v1/models").header(name, value).body(Body::empty()).unwrap();
        assert_eq!(front.send(request).await.status, 200);
    }
}

#[tokio::test]
async fn other_routes_are_404_in_openai_shape() {
    let front = Front::new();
    for (method, path) in
        [("GET", "/v1/embeddings"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/x")]
    {
        let answer = front.send(request(method, path).body(Body::from("{}")).unwrap()).await;
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.error().0, "not_found");
    }
    let answer = front.get("/api/v1/nope").await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.json()["schema"], "shoal.error/0");
}

#[tokio::test]
async fn wrong_method_is_405_and_names_the_right_ones() {
    let front = Front::new();
    let answer = front.get("/v1/chat/completions").await;
    assert_eq!((answer.status.as_u16(), answer.header("allow")), (405, "POST"));
    assert_eq!(answer.error().0, "method_not_allowed");
    let answer = front.post("/api/v1/swarm", "{}").await;
    assert_eq!((answer.status.as_u16(), answer.header("allow")), (405, "GET,HEAD"));
    assert_eq!(answer.json()["schema"], "shoal.error/0");
}

#[tokio::test]
async fn pages_that_ask_without_an_origin_are_known_by_fetch_metadata() {
    let front = Front::new();
    let ask = async |path: &str, site: &str, mode: &str| {
        let request = request("GET", path).header("sec-fetch-site", site).header("sec-fetch-mode", mode);
        front.send(request.body(Body::empty()).unwrap()).await.status.as_u16()
    };
    for site in ["cross-site", "same-site"] {
        assert_eq!(
            ask("/api/v1/swarm", site, "no-cors").await,
            403,
            "an image or a hidden fetch of another page"
        );
        assert_eq!(ask("/", site, "navigate").await, 200, "a link to the page");
    }
    assert_eq!(ask("/api/v1/swarm", "same-origin", "cors").await, 200);
    assert_eq!(ask("/", "none", "navigate").await, 200);
}
