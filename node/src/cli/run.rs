//! `shoal run`: talk to a model.

use std::io::{self, IsTerminal, Read, Write};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use shoal_web::MAX_TEMPERATURE;
use shoal_web::api::{self, InstanceState, ServeRequest, Swarm};

use super::print_json;
use crate::client::chat::{Answer, ChatBody, ChatEvent, ChatStream, Extension, Message};
use crate::client::{Agent, AgentArgs, wait};
use crate::exit::Failure;
use crate::terminal::{Paint, ProgressLine, note, printable};

const EXAMPLES: &str = "\
Examples:
  shoal run smollm2-135m \"Why is the sky blue?\"
  shoal run smollm2-135m                            a conversation; /clear forgets it, Ctrl-D ends it
  shoal run smollm2-135m < question.txt             the prompt from a file
  shoal run smollm2-135m \"Name a colour.\" --temperature 0 --json

The model is served if it is not yet, and stays served; `shoal stop` ends that.";

/// A prompt from standard input is never longer: the HTTP API takes 16 MiB.
const MAX_PROMPT_BYTES: u64 = 16 << 20;
/// What is asked where somebody types.
const ASK: &str = "> ";

/// Ask a model, or talk with it; it is served if it is not yet
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Run {
    /// The model, or an instance of `shoal status`
    #[arg(value_name = "MODEL")]
    model: String,
    /// What to ask [default: a conversation on a terminal, else all of standard input]
    #[arg(value_name = "PROMPT")]
    prompt: Option<String>,
    /// Tokens to answer with at most [default: to the end of the context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// How random; 0 always takes the likeliest token [default: the model's own]
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Repeat the same random choices
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Say the answer as one JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// What `--temperature` says.
fn temperature(text: &str) -> Result<f32, String> {
    let number =
        text.parse().ok().filter(|number: &f32| (0.0..=MAX_TEMPERATURE).contains(&f64::from(*number)));
    number.ok_or_else(|| format!("a number from 0 to {MAX_TEMPERATURE}"))
}

/// What answers.
struct Instance {
    id: String,
    /// It did when it was looked for.
    ready: bool,
}

/// What `run --json` says.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    instance: &'a str,
    text: &'a str,
    usage: Usage,
    ttft_ms: Option<f64>,
    tokens_per_s: Option<f64>,
    finish_reason: Option<&'a str>,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
}

impl Run {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let agent = Agent::find(&self.agent)?;
        let is_conversation = self.prompt.is_none() && io::stdin().is_terminal();
        let prompt = match &self.prompt {
            Some(prompt) => Some(prompt.clone()),
            None if is_conversation => None,
            None => Some(read_all().await?),
        };
        let instance = self.instance(&agent).await?;
        match prompt {
            Some(prompt) => {
                let messages = vec![Message::user(prompt)];
                // Nothing is asked twice: what the agent takes before the instance is ready waits there until it is. Where it
                // comes to nothing, how the instance is says more of the reason.
                let begun = match self.begin(&agent, &instance, messages.clone()).await {
                    Err(_) if !instance.ready => {
                        wait_for(&agent, &instance.id).await?;
                        self.begin(&agent, &instance, messages).await?
                    }
                    begun => begun?,
                };
                let answer = self.show(begun).await?;
                if self.json {
                    print_json(&document(&instance.id, &answer))?;
                }
            }
            None => {
                wait_for(&agent, &instance.id).await?;
                self.converse(&agent, &instance).await?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// An instance that serves the model; a new one if there is none.
    async fn instance(&self, agent: &Agent) -> Result<Instance, Failure> {
        let swarm = agent.swarm().await?;
        if let Some(found) = serving(&swarm, &self.model) {
            return Ok(Instance { id: found.id.clone(), ready: found.state == InstanceState::Ready });
        }
        let mut progress = ProgressLine::start(format!("asking for {}", self.model));
        // Others may ask for it at this moment, on other machines.
        let request = ServeRequest { model: self.model.clone(), if_absent: true, ..ServeRequest::default() };
        let id = wait::to_serve(agent, &request, &mut progress).await?;
        progress.finish(None);
        Ok(Instance { id, ready: false })
    }

    /// Asks, and waits for the first text of the answer.
    async fn begin(
        &self,
        agent: &Agent,
        instance: &Instance,
        messages: Vec<Message>,
    ) -> Result<(ChatStream, ChatEvent), Failure> {
        let body = ChatBody {
            model: instance.id.clone(),
            messages,
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            seed: self.seed,
            extension: Extension::default(),
        };
        let mut progress = ProgressLine::start("thinking");
        let mut stream = agent.chat(&body).await?;
        let first = first_text(&mut stream, &mut progress).await?;
        progress.finish(None);
        Ok((stream, first))
    }

    /// Shows the answer as it comes, unless it is to be JSON.
    async fn show(&self, (mut stream, first): (ChatStream, ChatEvent)) -> anyhow::Result<Answer> {
        let mut event = first;
        while let ChatEvent::Text(text) = event {
            if !self.json {
                print_text(&text)?;
            }
            event = match stream.next().await {
                Ok(event) => event,
                Err(failure) => {
                    if !self.json {
                        print_text("\n")?;
                    }
                    return Err(failure.into());
                }
            };
            while let ChatEvent::Waiting(_) = event {
                event = stream.next().await?;
            }
        }
        if !self.json {
            print_text("\n")?;
            if stream.answer().finish_reason.as_deref() == Some("length") && io::stderr().is_terminal() {
                note("(cut off here: the context is full, or --max-tokens is reached)");
            }
        }
        Ok(stream.answer().clone())
    }

    async fn converse(&self, agent: &Agent, instance: &Instance) -> anyhow::Result<()> {
        note(format_args!("{}: /clear forgets the conversation, Ctrl-D ends it", instance.id));
        let paint = Paint::stdout();
        let mut messages: Vec<Message> = Vec::new();
        loop {
            print_raw(&paint.bold(ASK))?;
            let Some(line) = read_line().await? else {
                print_text("\n")?;
                return Ok(());
            };
            match line.trim() {
                "" => continue,
                "/clear" => {
                    messages.clear();
                    continue;
                }
                "/bye" | "/exit" | "/quit" => return Ok(()),
                command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                    note(format_args!(
                        "there is no {command}; /clear forgets the conversation, /bye ends it"
                    ));
                    continue;
                }
                prompt => messages.push(Message::user(prompt)),
            }
            let answer = async {
                let begun = self.begin(agent, instance, messages.clone()).await?;
                self.show(begun).await
            };
            match answer.await {
                Ok(answer) => messages.push(Message::assistant(answer.text)),
                Err(error) => {
                    // What cannot be answered is not part of the conversation, which goes on.
                    messages.pop();
                    note(format_args!("error: {}", Failure::of(&error).message));
                }
            }
        }
    }
}

/// An instance of this name or of this model that answers or will.
fn serving<'a>(swarm: &'a Swarm, model: &str) -> Option<&'a api::Instance> {
    let usable =
        |state| matches!(state, InstanceState::Ready | InstanceState::Loading | InstanceState::Placing);
    let matching = swarm.instances.iter().filter(|i| (i.id == model || i.model == model) && usable(i.state));
    matching.min_by_key(|i| (i.state != InstanceState::Ready, i.queued.unwrap_or(0)))
}

/// Waits until an instance answers.
async fn wait_for(agent: &Agent, instance: &str) -> Result<(), Failure> {
    let mut progress = ProgressLine::start(format!("asking for {instance}"));
    wait::for_instance(agent, instance, &mut progress).await?;
    progress.finish(None);
    Ok(())
}

/// Shows why nothing comes yet until something does.
async fn first_text(stream: &mut ChatStream, progress: &mut ProgressLine) -> Result<ChatEvent, Failure> {
    loop {
        match stream.next().await? {
            ChatEvent::Waiting(why) => progress.label(in_words(&why)),
            event => return Ok(event),
        }
    }
}

/// A comment of the stream for people.
fn in_words(comment: &str) -> String {
    match comment.split_once(' ') {
        Some(("queued", before)) => format!("waiting: {before} requests come first"),
        Some(("prefill", tokens)) => format!("reading {tokens} tokens"),
        Some(("loading", bytes)) if bytes.starts_with("0/0 ") => "finding a place for the model".to_owned(),
        Some(("loading", bytes)) => format!("loading the model: {bytes}"),
        _ => "thinking".to_owned(),
    }
}

/// What a model says cannot drive the terminal.
fn print_text(text: &str) -> io::Result<()> {
    if io::stdout().is_terminal() { print_raw(&printable(text)) } else { print_raw(text) }
}

fn print_raw(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn document<'a>(instance: &'a str, answer: &'a Answer) -> Document<'a> {
    Document {
        schema: "shoal.run/0",
        instance,
        text: &answer.text,
        usage: Usage { prompt_tokens: answer.prompt_tokens, completion_tokens: answer.completion_tokens },
        ttft_ms: answer.ttft.map(|ttft| ttft.as_secs_f64() * 1e3),
        tokens_per_s: answer.tokens_per_s(),
        finish_reason: answer.finish_reason.as_deref(),
    }
}

/// All of standard input, read on a thread of its own so that Ctrl-C still works.
async fn read_all() -> anyhow::Result<String> {
    let read = || {
        let mut text = String::new();
        let count = io::stdin().lock().take(MAX_PROMPT_BYTES + 1).read_to_string(&mut text);
        count.map(|_| text)
    };
    let text = tokio::task::spawn_blocking(read).await?.context("reading the prompt from standard input")?;
    if text.len() as u64 > MAX_PROMPT_BYTES {
        return Err(Failure::usage(format!("the prompt has more than {MAX_PROMPT_BYTES} bytes")).into());
    }
    if text.trim().is_empty() {
        return Err(Failure::usage("there is no prompt: standard input is empty").into());
    }
    // Which is what ended the line, and nothing that was asked.
    Ok(text.trim_end_matches(['\n', '\r']).to_owned())
}

/// A line that somebody types; nothing at the end of input.
async fn read_line() -> anyhow::Result<Option<String>> {
    let read = || {
        let mut line = String::new();
        io::stdin().read_line(&mut line).map(|count| (count > 0).then_some(line))
    };
    tokio::task::spawn_blocking(read).await?.context("reading standard input")
}
