//! One connection: opens the streams that its outbox asks for, takes those that the gate lets in.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use libp2p::core::upgrade::{InboundUpgrade, OutboundUpgrade, UpgradeInfo};
use libp2p::swarm::handler::{
    ConnectionEvent, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound,
};
use libp2p::swarm::{ConnectionHandler, ConnectionHandlerEvent, StreamUpgradeError, SubstreamProtocol};
use libp2p::{Stream, StreamProtocol};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::exchange;
use crate::swarm::line::{Connection, HelloFailure, Incoming, Outgoing};
use crate::swarm::mailbox::{MAX_CARRIED, MAX_UNDER_WAY};
use crate::swarm::{hello, mailbox};

/// The stream protocol of heartbeats.
const BEAT: &str = "/shoal/beat/0";
/// How long the other side may take to agree on a stream's protocol.
const OPEN_DEADLINE: Duration = Duration::from_secs(5);
/// How many streams we open at once; the others wait in the outbox.
const MAX_OPENING: usize = MAX_LETTERS + 2;
/// Letters each way: our own and those that we carry.
const MAX_LETTERS: usize = MAX_UNDER_WAY + MAX_CARRIED;
/// How many hellos of one connection are answered at once. One is enough; a second may follow on its heels.
const MAX_HELLOS: usize = 2;
/// One stream of heartbeats each way, and one that is about to replace it.
const MAX_BEATS: usize = 2;

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Hello,
    Mail,
    Beat,
}

impl Kind {
    fn protocol(self) -> StreamProtocol {
        StreamProtocol::new(match self {
            Self::Hello => hello::PROTOCOL,
            Self::Mail => mailbox::PROTOCOL,
            Self::Beat => BEAT,
        })
    }
}

/// What is offered or asked for; the outcome is the stream and what it is for.
#[derive(Debug, Clone, Copy)]
pub struct Protocols(&'static [Kind]);

const OUTSIDER: Protocols = Protocols(&[Kind::Hello]);
const ADMITTED: Protocols = Protocols(&[Kind::Hello, Kind::Mail, Kind::Beat]);

impl Protocols {
    fn one(kind: Kind) -> Self {
        Self(match kind {
            Kind::Hello => &[Kind::Hello],
            Kind::Mail => &[Kind::Mail],
            Kind::Beat => &[Kind::Beat],
        })
    }

    fn kind(self, name: &StreamProtocol) -> Kind {
        self.0.iter().copied().find(|kind| kind.protocol() == *name).unwrap_or(Kind::Hello)
    }
}

impl UpgradeInfo for Protocols {
    type Info = StreamProtocol;
    type InfoIter = std::vec::IntoIter<StreamProtocol>;

    fn protocol_info(&self) -> Self::InfoIter {
        self.0.iter().map(|kind| kind.protocol()).collect::<Vec<_>>().into_iter()
    }
}

impl InboundUpgrade<Stream> for Protocols {
    type Output = (Kind, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_inbound(self, stream: Stream, name: StreamProtocol) -> Self::Future {
        ready(Ok((self.kind(&name), stream)))
    }
}

impl OutboundUpgrade<Stream> for Protocols {
    type Output = (Kind, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_outbound(self, stream: Stream, name: StreamProtocol) -> Self::Future {
        ready(Ok((self.kind(&name), stream)))
    }
}

/// The handler of one connection. Dropping it ends every task of the connection.
pub struct Handler {
    connection: Connection,
    outgoing: mpsc::Receiver<Outgoing>,
    /// Streams asked for and not yet agreed on.
    opening: usize,
    hellos: Arc<Semaphore>,
    letters: Arc<Semaphore>,
    beats: Arc<Semaphore>,
    tasks: JoinSet<()>,
}

impl Handler {
    pub fn new(connection: Connection, outgoing: mpsc::Receiver<Outgoing>) -> Self {
        Self {
            connection,
            outgoing,
            opening: 0,
            hellos: Arc::new(Semaphore::new(MAX_HELLOS)),
            letters: Arc::new(Semaphore::new(MAX_LETTERS)),
            beats: Arc::new(Semaphore::new(MAX_BEATS)),
            tasks: JoinSet::new(),
        }
    }

    /// Takes a stream that the other side opened, or drops it where there are too many: the other side then sees its end.
    fn take(&mut self, kind: Kind, stream: Stream) {
        let places = match kind {
            Kind::Hello => &self.hellos,
            Kind::Mail => &self.letters,
            Kind::Beat => &self.beats,
        };
        let Ok(place) = places.clone().try_acquire_owned() else { return };
        let connection = self.connection.clone();
        self.tasks.spawn(async move {
            match kind {
                Kind::Hello => exchange::answer_hello(connection, stream).await,
                Kind::Mail => exchange::answer_letter(connection, stream).await,
                Kind::Beat => exchange::hear_beats(connection, stream).await,
            }
            drop(place);
        });
    }

    fn say(&mut self, outgoing: Outgoing, stream: Stream) {
        let connection = self.connection.clone();
        match outgoing {
            Outgoing::Hello(hello) => self.tasks.spawn(exchange::ask_hello(connection, hello, stream)),
            Outgoing::Letter(letter) => self.tasks.spawn(exchange::ask_letter(letter, stream)),
            Outgoing::Beats(beats) => self.tasks.spawn(exchange::say_beats(beats, stream)),
        };
    }

    fn fail(&mut self, outgoing: Outgoing, foreign: bool, text: String) {
        match outgoing {
            Outgoing::Hello(_) => {
                let failure = if foreign { HelloFailure::Foreign(text) } else { HelloFailure::Broken(text) };
                let (inbox, connection) = (self.connection.shared.inbox.clone(), self.connection.id);
                self.tasks.spawn(async move {
                    let _ = inbox.send(Incoming::HelloAnswered { connection, answer: Err(failure) }).await;
                });
            }
            Outgoing::Letter(letter) => drop(letter.reply.send(Err(text))),
            Outgoing::Beats(_) => {
                tracing::debug!(node = %self.connection.node, text, "no stream for heartbeats")
            }
        }
    }
}

impl ConnectionHandler for Handler {
    type FromBehaviour = Infallible;
    type ToBehaviour = Infallible;
    type InboundProtocol = Protocols;
    type OutboundProtocol = Protocols;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = Outgoing;

    fn listen_protocol(&self) -> SubstreamProtocol<Protocols, ()> {
        let offered = if self.connection.line.is_open() { ADMITTED } else { OUTSIDER };
        SubstreamProtocol::new(offered, ()).with_timeout(OPEN_DEADLINE)
    }

    /// The swarm's task alone closes connections: it knows why.
    fn connection_keep_alive(&self) -> bool {
        true
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<ConnectionHandlerEvent<Protocols, Outgoing, Infallible>> {
        while let Poll::Ready(Some(_)) = self.tasks.poll_join_next(cx) {}
        if self.opening < MAX_OPENING
            && let Poll::Ready(Some(outgoing)) = self.outgoing.poll_recv(cx)
        {
            self.opening += 1;
            let kind = match outgoing {
                Outgoing::Hello(_) => Kind::Hello,
                Outgoing::Letter(_) => Kind::Mail,
                Outgoing::Beats(_) => Kind::Beat,
            };
            let protocol = SubstreamProtocol::new(Protocols::one(kind), outgoing).with_timeout(OPEN_DEADLINE);
            return Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest { protocol });
        }
        Poll::Pending
    }

    fn on_behaviour_event(&mut self, event: Infallible) {
        match event {}
    }

    fn on_connection_event(&mut self, event: ConnectionEvent<'_, Protocols, Protocols, (), Outgoing>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound {
                protocol: (kind, stream),
                ..
            }) => {
                self.take(kind, stream);
            }
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound {
                protocol: (_, stream),
                info,
                ..
            }) => {
                self.opening = self.opening.saturating_sub(1);
                self.say(info, stream);
            }
            ConnectionEvent::DialUpgradeError(DialUpgradeError { info, error, .. }) => {
                self.opening = self.opening.saturating_sub(1);
                let foreign = matches!(error, StreamUpgradeError::NegotiationFailed);
                let text = match error {
                    StreamUpgradeError::Timeout => "no stream was agreed on in time".into(),
                    StreamUpgradeError::NegotiationFailed => "it does not speak this protocol".into(),
                    StreamUpgradeError::Io(error) => error.to_string(),
                    StreamUpgradeError::Apply(never) => match never {},
                };
                self.fail(info, foreign, text);
            }
            _ => {}
        }
    }
}
