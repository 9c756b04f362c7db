//! What the APIs ask of whoever knows the swarm: the [`SwarmView`] trait.

use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::api::{
    ApiError, ModelEntry, OpenWindow, Plan, PlanRequest, PullRequest, ServeRequest, Served, Swarm,
};

/// The swarm, as seen and commanded from one node.
#[async_trait]
pub trait SwarmView: Send + Sync + 'static {
    /// The swarm now. Must be cheap: called for each request, and up to twice a second for each reader of events.
    fn swarm(&self) -> Swarm;

    /// Changes whenever [`SwarmView::swarm`] would show something new (times alone do not count); the value is
    /// that [`Swarm::seq`].
    fn changes(&self) -> watch::Receiver<u64>;

    /// Where a model would go; a plan that does not fit is not an error.
    async fn plan(&self, request: PlanRequest) -> Result<Plan, ApiError>;

    /// Asks for a model to be served; returns once the swarm has agreed to try.
    async fn serve(&self, request: ServeRequest) -> Result<Served, ApiError>;

    /// Takes an instance down; the id may be a unique prefix.
    async fn stop(&self, instance: &str) -> Result<(), ApiError>;

    /// Lets machines join for so long from now; zero closes the window.
    async fn open(&self, duration: Duration) -> Result<OpenWindow, ApiError>;

    /// The models this node knows.
    async fn models(&self) -> Vec<ModelEntry>;

    /// Starts to pull a model; one that is there or on its way already is no error.
    async fn pull(&self, request: PullRequest) -> Result<(), ApiError>;
}
