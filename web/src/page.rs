//! The dashboard: files that are part of the binary.

use axum::Router;
use axum::extract::Request;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY,
};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::router::Shared;

/// Nothing from elsewhere, nothing inline, not in anyone's frame.
const POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      object-src 'none'; require-trusted-types-for 'script'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// One file: where it is found, what it is, and its bytes.
struct Asset {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

macro_rules! asset {
    ($path:literal, $kind:expr, $file:literal) => {
        Asset { path: $path, kind: $kind, bytes: include_bytes!(concat!("../page/", $file)) }
    };
}

static ASSETS: &[Asset] = &[
    asset!("/", HTML, "index.html"),
    asset!("/style.css", CSS, "style.css"),
    asset!("/app.js", SCRIPT, "app.js"),
    asset!("/app/api.js", SCRIPT, "app/api.js"),
    asset!("/app/chat.js", SCRIPT, "app/chat.js"),
    asset!("/app/colours.js", SCRIPT, "app/colours.js"),
    asset!("/app/dom.js", SCRIPT, "app/dom.js"),
    asset!("/app/downloads.js", SCRIPT, "app/downloads.js"),
    asset!("/app/feed.js", SCRIPT, "app/feed.js"),
    asset!("/app/format.js", SCRIPT, "app/format.js"),
    asset!("/app/header.js", SCRIPT, "app/header.js"),
    asset!("/app/instances.js", SCRIPT, "app/instances.js"),
    asset!("/app/links.js", SCRIPT, "app/links.js"),
    asset!("/app/nodes.js", SCRIPT, "app/nodes.js"),
    asset!("/app/parts.js", SCRIPT, "app/parts.js"),
    asset!("/app/picture.js", SCRIPT, "app/picture.js"),
    asset!("/app/serve.js", SCRIPT, "app/serve.js"),
    asset!("/app/stream.js", SCRIPT, "app/stream.js"),
    asset!("/app/views.js", SCRIPT, "app/views.js"),
    asset!("/favicon.svg", SVG, "favicon.svg"),
];

/// The page's routes.
pub(crate) fn routes() -> Router<Shared> {
    ASSETS.iter().fold(Router::new(), |router, asset| {
        let etag = etag(asset.bytes);
        router.route(asset.path, get(move |request: Request| async move { serve(asset, &etag, &request) }))
    })
}

/// The file, or "you have it already". It is asked for each time (`no-cache`), since a new version of the binary
/// brings a new page.
fn serve(asset: &Asset, etag: &str, request: &Request) -> Response {
    let known = request.headers().get(IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let unchanged = known.is_some_and(|known| known.split(',').any(|one| one.trim() == etag));
    let mut response =
        if unchanged { StatusCode::NOT_MODIFIED.into_response() } else { asset.bytes.into_response() };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(asset.kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    if let Ok(etag) = HeaderValue::from_str(etag) {
        headers.insert(ETAG, etag);
    }
    response
}

/// The bytes' name: FNV-1a, 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>). It tells versions of our own
/// files apart; nobody has a reason to forge it.
fn etag(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("\"{hash:016x}\"")
}
