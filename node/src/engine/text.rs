//! From a conversation to tokens and from tokens to text: what the head needs of a model besides its shard.

use std::sync::Arc;

use shoal_model::sampling::{MAX_LOGPROBS, Sampling};
use shoal_model::step::Request;
use shoal_model::template::{ChatTemplate, Message};
use shoal_model::text::TextStream;
use shoal_model::tokenizer::Tokenizer;

use super::session::{Ask, Failure, MAX_CANDIDATE_BYTES};

/// Turns the tokens of one answer into text.
pub trait Text: Send {
    /// The text that became certain with `token`, and whether a stop string was reached.
    fn push(&mut self, token: u32) -> (String, bool);
    /// What was held back because it could have become a stop string or the rest of a character. Nothing follows.
    fn finish(&mut self) -> String;
    /// The bytes of any token, up to [`MAX_CANDIDATE_BYTES`].
    fn bytes(&self, token: u32) -> Vec<u8>;
    /// Whether the model ends its turn with this token.
    fn is_end(&self, token: u32) -> bool;
}

/// The tokenizer and the template of a model, as its head holds them.
#[derive(Debug, Clone)]
pub struct Scribe {
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
    context: u32,
    vocab: u32,
}

struct Stream {
    /// None once finished.
    stream: Option<TextStream>,
    tokenizer: Arc<Tokenizer>,
}

impl Text for Stream {
    fn push(&mut self, token: u32) -> (String, bool) {
        self.stream.as_mut().map_or_else(Default::default, |stream| {
            let piece = stream.push(token);
            (piece.text, piece.stopped)
        })
    }

    fn finish(&mut self) -> String {
        self.stream.take().map(TextStream::finish).unwrap_or_default()
    }

    fn bytes(&self, token: u32) -> Vec<u8> {
        let bytes = self.tokenizer.bytes(token);
        bytes[..bytes.len().min(MAX_CANDIDATE_BYTES)].to_vec()
    }

    fn is_end(&self, token: u32) -> bool {
        self.tokenizer.is_end(token)
    }
}

impl Scribe {
    /// For an instance whose slots hold `context` tokens, of a model with logits for `vocab` tokens.
    pub fn new(tokenizer: Tokenizer, template: ChatTemplate, context: u32, vocab: u32) -> Self {
        Scribe { tokenizer: Arc::new(tokenizer), template: Arc::new(template), context, vocab }
    }

    /// The request in tokens, checked against the context. `seed` is used when the request names none.
    pub fn request(&self, ask: &Ask, seed: u64) -> Result<Request, Failure> {
        let messages: Vec<Message> = ask
            .messages
            .iter()
            .map(|message| Message { role: message.role.clone(), content: message.content.clone() })
            .collect();
        let prompt = self.template.render(&messages, true).map_err(invalid)?;
        // Before the work of tokenizing: a bound from below, far cheaper.
        let least = self.tokenizer.least_tokens(&prompt);
        if least > self.context as usize {
            let prompt_tokens = u32::try_from(least).unwrap_or(u32::MAX);
            return Err(Failure::ContextLength { prompt_tokens, at_least: true, context: self.context });
        }
        let prompt = self.tokenizer.encode_prompt(&prompt).map_err(invalid)?;
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        // One position at least must be left for the first token of the answer to be run from.
        if prompt_tokens > self.context {
            return Err(Failure::ContextLength { prompt_tokens, at_least: false, context: self.context });
        }
        if prompt.is_empty() {
            return Err(Failure::Invalid(
                "the conversation renders to no tokens: give a message with text".into(),
            ));
        }
        // The last token of an answer is sampled from the row at the last position, so the answer may have one token
        // more than there are positions left.
        let room = self.context - prompt_tokens + 1;
        let sampling = Sampling {
            temperature: ask.temperature.unwrap_or(1.0),
            top_p: ask.top_p.unwrap_or(1.0),
            top_k: ask.top_k.unwrap_or(0),
            min_p: ask.min_p.unwrap_or(0.0),
            typical_p: ask.typical_p.unwrap_or(1.0),
            repetition_penalty: ask.repetition_penalty.unwrap_or(1.0),
            presence_penalty: ask.presence_penalty,
            frequency_penalty: ask.frequency_penalty,
            logit_bias: ask.logit_bias.clone(),
            seed: ask.seed.unwrap_or(seed),
        };
        // The ranks would refuse what is out of range, and the instance would end.
        sampling.check(self.vocab).map_err(|error| Failure::Field {
            name: error.parameter().to_owned(),
            text: error.to_string(),
        })?;
        Ok(Request {
            id: ask.id,
            prompt,
            sampling,
            logprobs: ask.logprobs.map(|count| count.min(MAX_LOGPROBS)),
            max_tokens: ask.max_tokens.unwrap_or(room).min(room),
            stop: ask.stop.clone(),
            ignore_eos: ask.ignore_eos,
            trace: ask.trace,
        })
    }

    /// A new stream of text for a request.
    pub fn stream(&self, stop: &[String]) -> Box<dyn Text> {
        Box::new(Stream {
            stream: Some(TextStream::new(self.tokenizer.clone(), stop)),
            tokenizer: self.tokenizer.clone(),
        })
    }
}

fn invalid(error: impl std::fmt::Display) -> Failure {
    Failure::Invalid(error.to_string())
}
