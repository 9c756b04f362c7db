//! `/api/v1`: the documents, and what is asked of the swarm.

use axum::body::Body;
use serde_json::{Value, json};
use shoal_web::api::{ErrorDocument, Swarm};

use crate::fake::{Front, SWARM, request};

#[tokio::test]
async fn the_swarm_document_is_that_of_the_contract() {
    let front = Front::new();
    let answer = front.get("/api/v1/swarm").await;
    assert_eq!(answer.header("cache-control"), "no-store");
    assert_eq!(answer.json(), serde_json::from_str::<Value>(SWARM).unwrap(), "no field is lost or renamed");
    let wrong = SWARM.replace("shoal.status/0", "shoal.status/9");
    let error = serde_json::from_str::<Swarm>(&wrong).unwrap_err().to_string();
    assert!(error.contains("shoal.status/0") && error.contains("shoal.status/9"), "{error}");
}

#[tokio::test]
async fn health_names_node_and_scheduler() {
    let front = Front::new();
    let health = front.get("/health").await.json();
    let swarm: Swarm = serde_json::from_str(SWARM).unwrap();
    assert_eq!(
        health,
        json!({"schema": "shoal.health/0", "status": "ok", "node": swarm.own, "swarm": "default",
            "scheduler": swarm.scheduler})
    );
    front.swarm.change(|swarm| swarm.scheduler = None);
    assert_eq!(front.get("/health").await.json()["status"], "forming");
}

#[tokio::test]
async fn serve_stop_open_and_pull() {
    let front = Front::new();
    let answer = front.post("/api/v1/instances", json!({"model": "m", "context": 2048})).await;
    assert_eq!(answer.status, 202);
    assert_eq!(answer.json(), json!({"schema": "shoal.instance/0", "instance": "m-zzzz"}));
    let answer = front
        .send(request("DELETE", "/api/v1/instances/smollm2-135m-k3qa").body(Body::empty()).unwrap())
        .await;
    assert_eq!(answer.status, 202);
    assert_eq!(answer.json(), json!({"schema": "shoal.stopping/0", "instance": "smollm2-135m-k3qa"}));
    let answer = front.post("/api/v1/open", json!({"duration_s": 600})).await;
    assert_eq!(answer.json()["open_until"], "2026-11-30T00:53:20.000Z");
    let answer = front.post("/api/v1/models/pull", json!({"model": "smollm2-135m"})).await;
    assert_eq!(answer.status, 202);
    let asked = front.swarm.asked.lock().unwrap();
    assert!(asked[0].starts_with("serve ") && asked[0].contains("Some(2048)"), "{asked:?}");
    assert_eq!(asked[1..], ["stop smollm2-135m-k3qa", "open 600", "pull smollm2-135m"]);
}

#[tokio::test]
async fn errors_say_code_message_and_fix() {
    let front = Front::new();
    let answer = front.post("/api/v1/plan", json!({"model": "nope"})).await;
    assert_eq!(answer.status, 404);
    let error: ErrorDocument = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(
        (error.error.code.as_str(), error.error.fix.as_deref()),
        ("model_not_found", Some("shoal models list"))
    );
    let answer = front.send(request("DELETE", "/api/v1/instances/gone").body(Body::empty()).unwrap()).await;
    assert_eq!(
        (answer.status.as_u16(), answer.json()["error"]["code"].as_str()),
        (404, Some("instance_not_found"))
    );
    let answer = front.send(request("DELETE", "/api/v1/instances/%ff").body(Body::empty()).unwrap()).await;
    assert_eq!(
        (answer.status.as_u16(), answer.json()["error"]["code"].as_str()),
        (400, Some("invalid_path"))
    );
    let answer = front.post("/api/v1/instances", "{").await;
    assert_eq!(answer.json()["error"]["code"], "invalid_json");
}

/// A setting that is misspelled, or of another type, is never taken for the default.
#[tokio::test]
async fn a_wrong_field_is_named() {
    let front = Front::new();
    let serve = [
        ("[]", "invalid_type", "the request must be an object, not a list"),
        (r#"["smollm2-135m"]"#, "invalid_type", "the request must be an object, not a list"),
        ("null", "invalid_type", "the request must be an object, not null"),
        (r#"{"context":1}"#, "invalid_type", "model is missing"),
        (r#"{"model":1}"#, "invalid_type", "model must be a string, not a number"),
        (r#"{"model":""}"#, "invalid_value", "model is empty"),
        (r#"{"model":"m","context":"1"}"#, "invalid_type", "context must be an integer, not a string"),
        (r#"{"model":"m","context":-1}"#, "invalid_value", "context must be from 0 to 4294967295, and is -1"),
        (r#"{"model":"m","slots":1.5}"#, "invalid_type", "slots must be an integer, not a number"),
        (r#"{"model":"m","parallel":{}}"#, "invalid_type", "parallel must be a string, not an object"),
        (r#"{"model":"m","nodes":"a"}"#, "invalid_type", "nodes must be a list, not a string"),
        (r#"{"model":"m","nodes":["a",1]}"#, "invalid_type", "nodes[1] must be a string, not a number"),
        (
            r#"{"model":"m","contex":1}"#,
            "unknown_field",
            "there is no field \"contex\" here; known are model, context, slots, kv_type, parallel, cut, nodes, if_absent",
        ),
    ];
    let twice = [
        (
            r#"{"model":"m","context":1,"context":2}"#,
            "duplicate_field",
            "the field \"context\" comes twice at line 1 column 34",
        ),
        (
            r#"{"model":"m","nodes":[{"a":1,"a":1}]}"#,
            "duplicate_field",
            "the field \"a\" comes twice at line 1 column 32",
        ),
    ];
    let serve = serve.iter().chain(&twice).flat_map(|case| [("plan", case), ("instances", case)]);
    let pull =
        ("models/pull", &(r#"{"model":true}"#, "invalid_type", "model must be a string, not a boolean"));
    let open = [
        ("open", &("{}", "invalid_type", "duration_s is missing")),
        ("open", &(r#"{"duration_s":"1"}"#, "invalid_type", "duration_s must be an integer, not a string")),
    ];
    for (path, (body, code, message)) in serve.chain([pull]).chain(open) {
        let answer = front.post(&format!("/api/v1/{path}"), *body).await;
        assert_eq!(answer.status.as_u16(), 400, "{path} {body}");
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["code"], &error["message"]),
            (&(*code).into(), &(*message).into()),
            "{path} {body}"
        );
    }
}

#[tokio::test]
async fn models_are_ordered() {
    let models = Front::new().get("/api/v1/models").await.json();
    assert_eq!(models["schema"], "shoal.models/0");
    let ids: Vec<&Value> = models["models"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["smollm2-135m", "zeta"]);
}
