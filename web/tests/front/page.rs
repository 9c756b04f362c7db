//! The dashboard's files and their headers.

use axum::body::Body;

use crate::fake::{Front, request};

#[tokio::test]
async fn files_are_served_with_a_strict_policy() {
    let front = Front::new();
    let answer = front.get("/").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "text/html; charset=utf-8");
    assert_eq!(answer.header("cache-control"), "no-cache");
    assert_eq!(answer.header("x-content-type-options"), "nosniff");
    let policy = answer.header("content-security-policy");
    assert!(policy.starts_with("default-src 'self';") && !policy.contains("unsafe"), "{policy}");
    // Whatever the page or one of its scripts refers to is there.
    let mut seen = std::collections::BTreeSet::new();
    let mut files = linked(&answer.body);
    while let Some(file) = files.pop() {
        if seen.insert(file.clone()) {
            let answer = front.get(&file).await;
            assert_eq!(answer.status, 200, "{file}");
            files.extend(linked(&answer.body));
        }
    }
    assert!(seen.len() > 10, "{seen:?}");
}

/// The files that a page or a script refers to.
fn linked(text: &str) -> Vec<String> {
    let quoted =
        text.split('"').filter(|text| text.starts_with('/') && text.contains('.') && !text.contains(' '));
    quoted.map(str::to_owned).collect()
}

#[tokio::test]
async fn a_file_that_the_browser_has_is_not_sent_again() {
    let front = Front::new();
    let etag = front.get("/app.js").await.header("etag").to_owned();
    for known in [etag.clone(), format!("\"x\", {etag}")] {
        let again = request("GET", "/app.js").header("if-none-match", known).body(Body::empty()).unwrap();
        let answer = front.send(again).await;
        assert_eq!((answer.status.as_u16(), answer.body.as_str()), (304, ""));
        assert_eq!(answer.header("etag"), etag);
    }
    let other = request("GET", "/app.js").header("if-none-match", "\"x\"").body(Body::empty()).unwrap();
    assert_eq!(front.send(other).await.status, 200);
}

#[tokio::test]
async fn nothing_is_inline() {
    let html = Front::new().get("/").await.body;
    for inline in ["<style", "style=", "onclick=", "javascript:", "<script>"] {
        assert!(!html.contains(inline), "{inline}");
    }
}
