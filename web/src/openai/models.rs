//! `/v1/models`: what requests may name.

use std::collections::BTreeMap;

use axum::extract::{Path, State};
use axum::response::IntoResponse;
use serde::Serialize;

use super::OpenAiError;
use crate::api::InstanceState;
use crate::router::Shared;
use crate::{GenerateError, ServedModel};

#[derive(Debug, Serialize)]
struct List {
    object: &'static str,
    data: Vec<Entry>,
}

/// A model with all instances that serve it.
#[derive(Clone, Debug, Serialize)]
struct Entry {
    id: String,
    object: &'static str,
    /// Seconds since 1970; 0 if that is not known (clients want a number).
    created: u64,
    owned_by: &'static str,
    context_length: Option<u32>,
    capabilities: [&'static str; 1],
    state: InstanceState,
    instances: Vec<String>,
}

/// `GET /v1/models`.
pub(crate) async fn models(State(shared): State<Shared>) -> impl IntoResponse {
    let data = entries(shared.generate.served().await).into_values().collect();
    axum::Json(List { object: "list", data })
}

/// `GET /v1/models/{id}`, where the id is a model's or an instance's and may contain slashes.
pub(crate) async fn model(
    State(shared): State<Shared>,
    Path(id): Path<String>,
) -> Result<impl IntoResponse, OpenAiError> {
    let mut entries = entries(shared.generate.served().await);
    if let Some(entry) = entries.remove(&id) {
        return Ok(axum::Json(entry));
    }
    let of_instance = entries.values().find(|entry| entry.instances.contains(&id));
    match of_instance {
        Some(entry) => Ok(axum::Json(Entry { id, ..entry.clone() })),
        None => Err(GenerateError::ModelNotFound { model: id, served: entries.into_keys().collect() }.into()),
    }
}

/// One entry per model: its best state and its longest context.
fn entries(served: Vec<ServedModel>) -> BTreeMap<String, Entry> {
    let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
    for one in served {
        let created = one.created.map_or(0, |created| created.unix_s());
        match entries.get_mut(&one.model) {
            Some(entry) => {
                entry.created = entry.created.max(created);
                entry.context_length = entry.context_length.max(one.context);
                if readiness(one.state) > readiness(entry.state) {
                    entry.state = one.state;
                }
                entry.instances.push(one.instance);
            }
            None => {
                let entry = Entry {
                    id: one.model.clone(),
                    object: "model",
                    created,
                    owned_by: "shoal",
                    context_length: one.context,
                    capabilities: ["completion"],
                    state: one.state,
                    instances: vec![one.instance],
                };
                entries.insert(one.model, entry);
            }
        }
    }
    entries
}

/// How near an instance is to answering.
fn readiness(state: InstanceState) -> u8 {
    match state {
        InstanceState::Ready => 4,
        InstanceState::Loading => 3,
        InstanceState::Placing => 2,
        InstanceState::Stopping => 1,
        InstanceState::Failed => 0,
    }
}
