//! A cable between the two ranks, over devices for RDMA of this machine.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use shoal_transport::rdma::cable::Patience;
use shoal_transport::rdma::station::Station;
use shoal_transport::rdma::upgrade::Wanted;
use shoal_transport::rdma::{self, PortState};
use shoal_transport::{CableHandle, Channel, Endpoint, Offer, Opening, Purpose};

use super::orders::Key;
use crate::exit::Failure;

/// How long the other end may be silent: ranks that share a core wait for each other.
const PATIENCE: Duration = Duration::from_secs(20);
/// Where both ranks are.
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The devices of ranks 0 and 1: two whose ports are active, which a cable has to join, or the only one for both.
pub(super) fn devices() -> Result<[String; 2], Failure> {
    let usage =
        |text: String| Failure::usage(format!("--rdma: {text}; shoal doctor says what would mend it"));
    let library = rdma::system().map_err(|error| usage(error.to_string()))?;
    let names = library.devices().map_err(|error| usage(error.to_string()))?;
    let active = |name: &String| {
        let port = library.open(name).and_then(|device| device.port());
        port.is_ok_and(|port| port.state == PortState::Active)
    };
    let mut active = names.into_iter().filter(active);
    match (active.next(), active.next()) {
        (Some(near), Some(far)) => Ok([near, far]),
        (Some(only), None) => Ok([only.clone(), only]),
        (None, _) => Err(usage("this machine has no device for RDMA whose port is active".to_owned())),
    }
}

/// A rank's end of the channel by which both agree on a cable, before and after they did.
pub(super) enum End {
    /// Rank 0's.
    Offered(Offer),
    /// Rank 1's.
    Accepted(Channel),
    /// Both's, with the anchor and the device's memory, which last as long as the cable is used.
    Joined { cable: CableHandle, _anchor: Channel, _station: Arc<Station> },
}

fn opening(id: [u8; 8]) -> Opening {
    let mut channel = [0xff; 16];
    channel[..8].copy_from_slice(&id);
    Opening { channel, purpose: Purpose::Anchor, context: [0; 32], frame_bytes: 8 << 10 }
}

impl End {
    /// Rank 0's, and its key.
    pub(super) fn offer(endpoint: &Endpoint, id: [u8; 8]) -> anyhow::Result<(End, Key)> {
        let offer = endpoint.offer(opening(id))?;
        let key = offer.public();
        Ok((End::Offered(offer), key))
    }

    /// Rank 1's, and its key.
    pub(super) fn accept(endpoint: &Endpoint, id: [u8; 8], offer: Key) -> anyhow::Result<(End, Key)> {
        let (key, channel) = endpoint.accept(opening(id), offer)?;
        Ok((End::Accepted(channel), key))
    }

    /// Agrees on a cable; `other` is rank 1's key and where it is.
    pub(super) fn join(
        self,
        endpoint: &Endpoint,
        device: &str,
        other: Option<(Key, SocketAddr)>,
    ) -> anyhow::Result<End> {
        let station = Arc::new(Station::open(&*rdma::system()?, device, |_| true)?);
        let patience = Patience { silence: PATIENCE, ..Patience::default() };
        let (cable, anchor) = match self {
            End::Offered(offer) => {
                let (key, address) = other.context("nobody to agree with")?;
                let mut anchor = offer.dial(key, vec![address])?;
                (endpoint.propose_cable(&mut anchor, &station, HERE, Wanted::Always, patience)?, anchor)
            }
            End::Accepted(mut anchor) => {
                (endpoint.answer_cable(&mut anchor, &station, HERE, patience)?, anchor)
            }
            End::Joined { .. } => bail!("there is a cable already"),
        };
        Ok(End::Joined { cable, _anchor: anchor, _station: station })
    }

    /// Messages that this end has sent over the cable.
    pub(super) fn sent(&self) -> anyhow::Result<u64> {
        let End::Joined { cable, .. } = self else { bail!("there is no cable yet") };
        cable.state()?;
        Ok(cable.stats().sent)
    }
}
