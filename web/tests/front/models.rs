//! `/v1/models`.

use serde_json::json;

use crate::fake::Front;

#[tokio::test]
async fn one_entry_per_model() {
    let front = Front::new();
    let answer = front.get("/v1/models").await;
    assert_eq!(
        answer.json(),
        json!({"object": "list", "data": [
            {"id": "smollm2-135m", "object": "model", "created": 1_796_000_000, "owned_by": "shoal",
             "context_length": 8192, "capabilities": ["completion"], "state": "ready",
             "instances": ["smollm2-135m-k3qa", "smollm2-135m-b2b2"]},
            {"id": "user/odd:name", "object": "model", "created": 1_796_000_000, "owned_by": "shoal",
             "context_length": null, "capabilities": ["completion"], "state": "placing",
             "instances": ["odd-name-a2a2"]},
        ]})
    );
}

#[tokio::test]
async fn ids_with_slash_colon_and_url_encoding() {
    let front = Front::new();
    for path in ["user/odd:name", "user%2Fodd%3Aname", "user%2fodd:name"] {
        let answer = front.get(&format!("/v1/models/{path}")).await;
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(answer.json()["id"], "user/odd:name");
    }
    let answer = front.get("/v1/models/smollm2-135m-b2b2").await;
    assert_eq!(answer.json()["id"], "smollm2-135m-b2b2", "an instance is a model's name too");
}

#[tokio::test]
async fn unknown_id_is_404_and_names_what_is_served() {
    let front = Front::new();
    let answer = front.get("/v1/models/gpt-x").await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.error(), ("model_not_found".into(), "model".into()));
    assert!(answer.body.contains("user/odd:name") && answer.body.contains("shoal serve gpt-x"));
}
