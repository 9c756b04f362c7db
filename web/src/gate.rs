//! What every request passes first: it gets an id, and whoever has no business here gets a reason.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, HOST, ORIGIN, VARY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use data_encoding::HEXLOWER;

use crate::Options;
use crate::api::{ApiError, ErrorKind};
use crate::openai::OpenAiError;

/// The header that carries a request's id.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// How long a browser may remember the answer to a preflight.
const PREFLIGHT_SECONDS: &str = "600";

/// The random 128-bit name of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(pub u128);

impl RequestId {
    /// A new one; none only if the system gives no random numbers.
    fn random() -> Option<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).ok()?;
        Some(RequestId(u128::from_be_bytes(bytes)))
    }

    /// 32 lower-case hexadecimal digits.
    pub fn hex(self) -> String {
        HEXLOWER.encode(&self.0.to_be_bytes())
    }
}

/// The rules, made once from the options.
pub(crate) struct Gate {
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl Gate {
    pub fn new(options: Options) -> Self {
        Gate { hosts: options.hosts, origins: options.origins }
    }

    /// Whether a `Host` (or the authority of a URI) names this machine in a way that DNS cannot forge.
    fn host_allowed(&self, authority: &str) -> bool {
        let Some(host) = host_of(authority) else { return false };
        host.parse::<IpAddr>().is_ok()
            || host.eq_ignore_ascii_case("localhost")
            || self.hosts.iter().any(|name| host.eq_ignore_ascii_case(name))
    }

    /// Whether a page of this origin may talk to us: our own page, or one that was allowed.
    fn origin_allowed(&self, origin: &str, host: &str) -> bool {
        let own = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        own.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
            || self.origins.iter().any(|allowed| origin.eq_ignore_ascii_case(allowed))
    }

    /// The reason why a request may not come in, with its status.
    fn judge(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        let host = single(headers, &HOST).unwrap_or_default();
        let target = uri.authority().map(|authority| authority.as_str());
        if !self.host_allowed(host) || !target.is_none_or(|target| self.host_allowed(target)) {
            let message = match headers.get_all(&HOST).iter().count() {
                1 => format!("the host {:?} is not a name of this machine", target.unwrap_or(host)),
                0 => "the request has no Host header, so a page elsewhere may have sent it".to_owned(),
                _ => "the request has several Host headers, so a page elsewhere may have sent it".to_owned(),
            };
            let error = ApiError::new(ErrorKind::Forbidden, "host_not_allowed", message)
                .fix("use http://localhost with the port, or the address of the machine");
            return Err(error);
        }
        let origin = single(headers, &ORIGIN).unwrap_or_default();
        let foreign = if headers.contains_key(ORIGIN) {
            !self.origin_allowed(origin, host)
        } else {
            // A page may ask without an Origin (an image, a fetch that may not read the answer): its answer stays
            // hidden from it, but it could use up what is bounded here.
            from_elsewhere(headers)
        };
        if foreign {
            let message = format!(
                "pages of {} may not use this node",
                if origin.is_empty() { "others" } else { origin }
            );
            let error = ApiError::new(ErrorKind::Forbidden, "origin_not_allowed", message)
                .fix("open the node's own page, or call it from a program");
            return Err(error);
        }
        if *method == Method::POST && !is_json(headers) {
            let error = ApiError::new(
                ErrorKind::WrongContentType,
                "unsupported_media_type",
                "the body must be JSON and the request must say so",
            )
            .fix("send the header Content-Type: application/json");
            return Err(error);
        }
        Ok(())
    }
}

/// The middleware.
pub(crate) async fn check(State(gate): State<Arc<Gate>>, mut request: Request, next: Next) -> Response {
    let Some(id) = RequestId::random() else {
        let error = ApiError::new(ErrorKind::Internal, "no_randomness", "the system gave no random numbers");
        return refuse(request.uri().path(), &error);
    };
    request.extensions_mut().insert(id);
    let origin = request.headers().get(ORIGIN).cloned();
    let judged = gate.judge(request.method(), request.uri(), request.headers());
    let admitted = judged.is_ok();
    let mut response = match judged {
        Err(error) => {
            tracing::debug!(request = %id.hex(), code = %error.code, "refused: {error}");
            refuse(request.uri().path(), &error)
        }
        Ok(()) if is_preflight(&request) => {
            preflight(request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS).cloned())
        }
        Ok(()) => next.run(request).await,
    };
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id.hex()) {
        headers.insert(X_REQUEST_ID, value);
    }
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.append(VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin.filter(|_| admitted) {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
    }
    response
}

/// An error in the shape that this path's clients read: `/api/` has Shoal's, everything else OpenAI's.
pub(crate) fn refuse(path: &str, error: &ApiError) -> Response {
    if path.starts_with("/api/") {
        error.clone().into_response()
    } else {
        OpenAiError::from(error).into_response()
    }
}

fn is_preflight(request: &Request) -> bool {
    *request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

/// Whatever headers the page wants to send, it may: SDKs add many of their own, and the origin has been judged.
fn preflight(asked: Option<HeaderValue>) -> Response {
    let headers = [
        (ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE")),
        (ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(HeaderValue::from_static("content-type"))),
        (ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_SECONDS)),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

/// The header's value if it is there exactly once and is text.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    if values.next().is_some() { None } else { value.to_str().ok() }
}

/// Whether a browser says that another page is behind this request (Fetch Metadata, a W3C draft), and not a person who
/// follows a link to here.
fn from_elsewhere(headers: &HeaderMap) -> bool {
    let site = single(headers, &SEC_FETCH_SITE);
    let mode = single(headers, &SEC_FETCH_MODE);
    matches!(site, Some("cross-site" | "same-site")) && mode != Some("navigate")
}

fn is_json(headers: &HeaderMap) -> bool {
    single(headers, &CONTENT_TYPE).is_some_and(|value| {
        value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
    })
}

/// The host of `host`, `host:port`, `[v6]` or `[v6]:port`; none if it is neither.
fn host_of(authority: &str) -> Option<&str> {
    let (host, rest) = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    match rest.strip_prefix(':') {
        Some(port) => port.parse::<u16>().is_ok().then_some(host),
        None => rest.is_empty().then_some(host),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_dns_cannot_forge() {
        let gate = Gate::new(Options { hosts: vec!["desk".into(), "desk.local".into()], origins: vec![] });
        for host in [
            "127.0.0.1:7711",
            "127.0.0.1",
            "[::1]:7711",
            "[::1]",
            "localhost:1",
            "LOCALHOST",
            "10.0.0.7:80",
            "Desk:1",
        ] {
            assert!(gate.host_allowed(host), "{host}");
        }
        for host in [
            "",
            ":7711",
            "evil.example",
            "evil.example:7711",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost:port",
            "localhost:99999",
            "[::1",
            "[::1]x",
            "desk.evil",
            "user@127.0.0.1",
            "::1",
        ] {
            assert!(!gate.host_allowed(host), "{host}");
        }
    }

    #[test]
    fn origins_of_our_own_and_allowed_ones() {
        let gate = Gate::new(Options { hosts: vec![], origins: vec!["http://localhost:3000".into()] });
        assert!(gate.origin_allowed("http://127.0.0.1:7711", "127.0.0.1:7711"));
        assert!(gate.origin_allowed("http://localhost:3000", "127.0.0.1:7711"));
        for origin in [
            "null",
            "",
            "http://127.0.0.1:7712",
            "http://evil.example",
            "http://localhost:3001",
            "127.0.0.1:7711",
        ] {
            assert!(!gate.origin_allowed(origin, "127.0.0.1:7711"), "{origin}");
        }
    }
}
