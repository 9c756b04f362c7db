//! Moves the bytes of tensors between the nodes of a swarm.
//!
//! This crate knows no model and no swarm. It knows two nodes that have something to say to each other for one purpose,
//! and gives them a [`Channel`]: an ordered, two-way, bounded stream of messages that survives the loss of the
//! connection under it.
//!
//! # Opening
//!
//! Each node has one [`Endpoint`], a TCP listener with a thread at its door. The upstream node makes an [`Offer`], whose
//! ephemeral public key travels to the other node by any authenticated way (in Shoal: signed, through the control
//! plane's mailbox). That node answers with a key of its own from [`Endpoint::accept`], and the first one dials:
//!
//! ```
//! use shoal_transport::{Endpoint, Opening, Purpose, Wait};
//! use std::time::Duration;
//!
//! let (upstream, downstream) = (Endpoint::bind("127.0.0.1:0".parse()?)?, Endpoint::bind("127.0.0.1:0".parse()?)?);
//! let opening = Opening { channel: [7; 16], purpose: Purpose::Step, context: [1; 32], frame_bytes: 64 << 10 };
//!
//! let offer = upstream.offer(opening)?;
//! let (answer, mut theirs) = downstream.accept(opening, offer.public())?;
//! let mut ours = offer.dial(answer, vec![downstream.local_addr()])?;
//!
//! let wait = Wait::up_to(Duration::from_secs(5));
//! assert!(ours.send(b"activations", wait)?);
//! let mut message = Vec::new();
//! assert!(theirs.recv(&mut message, 1 << 20, wait)?);
//! assert_eq!(message, b"activations");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Both sides must mean the same: purpose, frame size and a digest of instance, epoch and plan are compared when a
//! connection is opened. What belongs to another epoch is refused there; frames that still arrive for a channel that was
//! closed are dropped and counted. That is the fence between epochs, and no later check exists.
//!
//! # Using
//!
//! Everything is synchronous and driven by the thread that uses the channel. In place: [`Channel::slot`], fill,
//! [`Channel::commit`]; on the other side [`Channel::next`], read, [`Channel::release`]. By whole messages:
//! [`Channel::send`], [`Channel::recv`]. For several channels: [`wait_any`]. From other threads: [`Closer`], [`Waker`].
//!
//! A channel holds [`WINDOW_FRAMES`] slots in each direction ([`ring_bytes`] in all) and nothing more, whatever the other
//! side does. A slot is free again when the *reader* has released it and said so, on a frame of its own or on an empty
//! one after a quarter of the window or 20 ms. So a slow reader stops its writer, what arrives always has a place, and
//! the socket is always drained by whoever waits: word of freed slots cannot get stuck behind data.
//!
//! A thread that computes does not poll. The thread at the endpoint's door then does the little that must not wait: every
//! 20 ms it sends acknowledgements that are due, pushes out what the socket did not take, and notices lost connections.
//! When nothing is unfinished it sleeps.
//!
//! # Carriers
//!
//! What moves the frames is a carrier: a TCP connection, to the other side itself or over nodes between ([`Ways`]), memory that two
//! processes of one machine share ([`Options::shared_memory`]), or a share of a cable of queue pairs. It lives for one
//! *incarnation*; the channel outlives it. When it breaks, the side that dialled first dials again with a higher
//! incarnation, each says the first byte it lacks, the rest is sent again, and what came twice is dropped by its place in
//! the stream. A newer incarnation always wins over an older one that one side still believes in. If none comes within
//! [`HEAL_DEADLINE`] the channel is lost, and its user is told so.
//!
//! Nodes that have no address for each other are joined by others: the side that dials knows a way ([`Route`]), has a
//! [`Pass`] of each node on it, and is led on from one to the next. On each a forwarder's thread carries the bytes on; they are
//! sealed by the ends, whose frames and acknowledgements pass unchanged. To this crate a node between that fails is a
//! connection that broke. When a better way is there ([`Endpoint::ways_changed`]) the channel moves to it in the same manner,
//! without a pause in between: the old connection carries until the new one has been answered.
//!
//! An endpoint may be given a cable of RDMA queue pairs to another ([`rdma`], [`Endpoint::add_cable`]). Then channels dialled to it
//! are agreed over a connection as ever, and their frames go over the cable, plain; when it breaks they heal on connections. Ways
//! over nodes between go over the cables of their hops, sealed, where those were agreed on ([`Endpoint::propose_cable`]).
//!
//! On loopback, frames are plain with a CRC32C; elsewhere they are sealed, with one key per channel, direction and
//! incarnation; always so over others. The opening is authenticated in both cases. A wrong checksum or tag breaks the carrier, not the channel.
//!
//! # Invariants
//!
//! - Nothing is allocated and no thread is crossed on the way of a frame of an open channel.
//! - Nothing that arrives can make this side hold more than the stated memory, wait without a deadline, or panic.
//! - A byte is delivered once, in order, or the channel ends with a reason.
//! - There is no `unsafe` here but in [`rdma`].

#![deny(unsafe_code)]

mod carrier;
mod channel;
pub mod collective;
mod counters;
mod endpoint;
mod error;
mod fault;
mod frame;
mod hello;
mod keys;
pub mod rdma;
mod route;
mod shared;
mod state;
mod stream;
mod wait;
mod window;

pub use channel::{Channel, Closer, Frame, Waker, wait_any};
pub use counters::Counters;
pub use endpoint::{
    CableHandle, Carried, Dialled, Ended, Endpoint, HEAL_DEADLINE, MAX_FLOWS, OPEN_DEADLINE, Offer, Opening,
    Options, REASON_CABLE_ENDED, REASON_DROPPED, REASON_LOST, REASON_SHUT_DOWN, REASON_TOO_LONG,
};
pub use error::{BindError, ChannelError, GrantError, OpenError};
pub use fault::{Fault, Faults};
pub use hello::{Purpose, Refusal};
pub use keys::Protection;
pub use route::{MAX_RELAYS, Pass, PassRequest, Passage, Route, Ways};
pub use state::ChannelStats;
use state::Role;
pub use wait::Wait;
pub use window::{MAX_FRAME_BYTES, MIN_FRAME_BYTES, WINDOW_FRAMES, ring_bytes};
