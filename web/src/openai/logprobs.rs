//! The JSON of logprobs.

use serde::Serialize;

use crate::{Candidate, TokenLogprobs};

/// Of the tokens of a choice, or of a chunk of it.
#[derive(Debug, Default, Serialize)]
pub(super) struct Logprobs {
    content: Vec<Entry>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct Entry {
    #[serde(flatten)]
    chosen: Named,
    top_logprobs: Vec<Named>,
}

#[derive(Debug, Serialize)]
struct Named {
    /// The token's text; what is no whole character in it is U+FFFD, and only `bytes` tells.
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Logprobs {
    pub fn push(&mut self, token: TokenLogprobs) {
        let top_logprobs = token.top.into_iter().map(Named::from).collect();
        self.content.push(Entry { chosen: token.chosen.into(), top_logprobs });
    }
}

impl From<Candidate> for Named {
    fn from(candidate: Candidate) -> Self {
        let token = String::from_utf8_lossy(&candidate.bytes).into_owned();
        Named { token, logprob: candidate.logprob, bytes: candidate.bytes }
    }
}
