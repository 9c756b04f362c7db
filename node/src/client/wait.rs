//! Waiting for a model to be here and for an instance to be ready, with progress.

use std::time::Duration;

use shoal_web::api::{Instance, InstanceState, ModelState, Plan, RankState, ServeRequest, Swarm};
use tokio::time::Instant;

use super::Agent;
use crate::exit::{Exit, Failure};
use crate::terminal::{ProgressLine, printable};

/// What was just agreed on is seen by every node within this, or something is wrong.
const SEEN_WITHIN: Duration = Duration::from_secs(30);

/// Has the agent get the model's file first, because placing needs to know it and a download takes longer than any
/// answer may.
pub async fn for_model(agent: &Agent, model: &str, progress: &mut ProgressLine) -> Result<(), Failure> {
    let mut asked: Option<Instant> = None;
    let mut changes = None;
    loop {
        let models = agent.models().await?.models;
        let Some(entry) = models.iter().find(|entry| entry.id == model) else {
            let known: Vec<&str> = models.iter().map(|entry| entry.id.as_str()).collect();
            let message = format!("there is no model `{model}`; known are {}", known.join(", "));
            return Err(Failure::new(Exit::Unknown, "model_not_found", message)
                .fix("see `shoal models list`, or add a file with `shoal models add PATH`"));
        };
        if entry.state == ModelState::Present {
            return Ok(());
        }
        match asked {
            None => {
                agent.pull(model).await?;
                asked = Some(Instant::now());
                progress.label(format!("loading {model} onto this machine"));
            }
            Some(asked) if entry.state == ModelState::Absent && asked.elapsed() > SEEN_WITHIN => {
                let message = format!("the agent could not load the model `{model}`");
                return Err(Failure::new(Exit::Failed, "pull_failed", message)
                    .fix(format!("see its log for the reason, or try `shoal models pull {model}`")));
            }
            Some(_) => {}
        }
        let changes = match &mut changes {
            Some(changes) => changes,
            None => changes.insert(agent.changes().await?),
        };
        let swarm = changes.next().await?;
        if let Some(download) = swarm.downloads.iter().find(|d| d.model == model && d.node == swarm.own) {
            asked = Some(Instant::now());
            progress.bytes(download.done_bytes, download.total_bytes);
        }
    }
}

/// Asks for the model to be served; gives the instance's id. Where it does not fit the plan says why.
pub async fn to_serve(
    agent: &Agent,
    request: &ServeRequest,
    progress: &mut ProgressLine,
) -> Result<String, Failure> {
    for_model(agent, &request.model, progress).await?;
    match agent.serve(request).await {
        Err(failure) if failure.exit == Exit::NotPlaceable => {
            let planned = agent.plan(request).await?;
            Err(if planned.fits { failure } else { does_not_fit(&planned) })
        }
        served => served,
    }
}

/// The instance as soon as the agent knows of it, however far it is.
pub async fn to_see(agent: &Agent, instance: &str) -> Result<Instance, Failure> {
    let began = Instant::now();
    let mut changes = agent.changes().await?;
    loop {
        let swarm = changes.next().await?;
        if let Some(found) = swarm.instances.into_iter().find(|found| found.id == instance) {
            return Ok(found);
        }
        if began.elapsed() > SEEN_WITHIN {
            return Err(never_there(instance));
        }
    }
}

/// Waits until the instance answers; shows how far it is.
pub async fn for_instance(
    agent: &Agent,
    instance: &str,
    progress: &mut ProgressLine,
) -> Result<Instance, Failure> {
    let began = Instant::now();
    let mut changes = agent.changes().await?;
    loop {
        let swarm = changes.next().await?;
        let Some(found) = swarm.instances.iter().find(|found| found.id == instance) else {
            if began.elapsed() > SEEN_WITHIN {
                return Err(never_there(instance));
            }
            continue;
        };
        match found.state {
            InstanceState::Ready => return Ok(found.clone()),
            InstanceState::Failed => return Err(why(found, Exit::Failed)),
            InstanceState::Stopping => {
                let message = format!("the instance {instance} is being stopped");
                return Err(Failure::new(Exit::Failed, "instance_stopped", message));
            }
            InstanceState::Placing if found.why_not.is_some() => return Err(why(found, Exit::NotPlaceable)),
            InstanceState::Placing => progress.label(format!("placing {instance}")),
            InstanceState::Loading => show_loading(&swarm, found, progress),
        }
    }
}

fn never_there(instance: &str) -> Failure {
    let message = format!("the instance {instance} was stopped, or was never there");
    Failure::new(Exit::Unknown, "instance_not_found", message)
}

fn show_loading(swarm: &Swarm, instance: &Instance, progress: &mut ProgressLine) {
    let ranks = || instance.stages.iter().flat_map(|stage| &stage.ranks);
    let is_downloading =
        |node: &str| ranks().any(|rank| rank.node == node && rank.state == RankState::Downloading);
    let downloads = swarm.downloads.iter().filter(|d| d.model == instance.model && is_downloading(&d.node));
    // Several nodes load at once: the slowest one decides.
    let slowest =
        downloads.max_by_key(|d| d.total_bytes.map_or(0, |total| total.saturating_sub(d.done_bytes)));
    if let Some(download) = slowest {
        progress.label(format!("loading {} onto {}", instance.model, node_name(swarm, &download.node)));
        progress.bytes(download.done_bytes, download.total_bytes);
        return;
    }
    progress.label(format!("loading {} into memory", instance.id));
    let done = ranks().map(|rank| rank.loaded_bytes.unwrap_or(0)).sum();
    let total = ranks().map(|rank| rank.weights_bytes).sum();
    progress.bytes(done, Some(total));
}

/// The name of a node, or its id where nothing else is known.
pub fn node_name<'a>(swarm: &'a Swarm, id: &'a str) -> &'a str {
    swarm.nodes.iter().find(|node| node.id == id).map_or(id, |node| node.name.as_str())
}

/// Why an instance is not coming up, with each node's reason.
fn why(instance: &Instance, exit: Exit) -> Failure {
    let reason = instance.reason.as_ref();
    let code = reason.map_or("no_placement", |reason| reason.code.as_str());
    let text = reason.map_or("there is no place for it", |reason| reason.message.as_str());
    let mut message = format!("{} is not served: {text}", instance.id);
    for node in instance.why_not.iter().flat_map(|why| &why.nodes) {
        message.push_str(&format!("\n  {}", printable(&node.text)));
    }
    let nearest =
        instance.why_not.as_ref().and_then(|why| why.nearest.first()).map(|nearest| nearest.text.clone());
    let failure = Failure::new(exit, code, message);
    match reason.and_then(|reason| reason.fix.clone()).or(nearest) {
        Some(fix) => failure.fix(fix),
        None => failure
            .fix(format!("it is placed when there is room; take it back with `shoal stop {}`", instance.id)),
    }
}

/// The failure of something that would need the plan to fit, with each node's reason.
pub fn does_not_fit(plan: &Plan) -> Failure {
    let mut message =
        format!("{} with a context of {} and {} slots does not fit", plan.model, plan.context, plan.slots);
    if let Some(reason) = &plan.reason {
        message.push_str(&format!("\n  {}", printable(&reason.message)));
    }
    for node in &plan.nodes {
        message.push_str(&format!("\n  {}", printable(&node.text)));
    }
    let failure = Failure::new(Exit::NotPlaceable, "no_placement", message);
    match plan.nearest.first() {
        Some(nearest) => failure.fix(&nearest.text),
        None => failure,
    }
}
