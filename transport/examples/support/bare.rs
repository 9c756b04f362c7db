//! The least that any protocol over queue pairs must do: one receive posted ahead, one message of the length that is asked for.

use std::sync::Arc;
use std::thread;

use shoal_transport::rdma::{
    Address, Completion, CompletionQueue, Depth, Direction, Kind, Library, Mtu, Path, QueuePair, Slot,
};

use super::Outcome;

/// One end.
pub struct Bare {
    pair: Box<dyn QueuePair>,
    queue: Arc<dyn CompletionQueue>,
    outgoing: Option<Slot>,
    receives: Vec<Slot>,
    gid_index: u8,
    mtu: Mtu,
    address: Address,
}

impl Bare {
    /// Makes the queue pair, in INIT, for messages of `size` bytes.
    pub fn prepare(library: &dyn Library, device: &str, kind: Kind, size: usize) -> Outcome<Bare> {
        let device = library.open(device)?;
        let (port, gids) = (device.port()?, device.gids()?);
        let place = gids.iter().position(|gid| gid.ipv4().is_some()).ok_or("no IPv4 address")?;
        let domain = device.domain()?;
        let queue = domain.clone().completion_queue(16)?;
        let mut pair = queue.clone().queue_pair(kind, Depth { sends: 4, receives: 4 })?;
        pair.initialise()?;
        let (mut receives, _) = domain.region(4 * size)?.cut(size, 3).ok_or("no memory")?;
        let outgoing = receives.pop();
        let address = Address { gid: gids[place], lid: port.lid, number: pair.number(), packet: 0 };
        Ok(Bare { pair, queue, outgoing, receives, gid_index: u8::try_from(place)?, mtu: port.mtu, address })
    }

    /// Where it is, for the other end.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Up to RTS, with its receives. Both ends of a cable have equal ports here.
    pub fn connect(&mut self, to: Address) -> Outcome<()> {
        self.pair.ready_to_receive(&Path { gid_index: self.gid_index, mtu: self.mtu, to })?;
        self.pair.ready_to_send(0)?;
        for slot in self.receives.drain(..) {
            self.pair.post_receive(slot).map_err(|refused| refused.error)?;
        }
        Ok(())
    }

    fn wait(&mut self, direction: Direction) -> Outcome<Slot> {
        let mut polled = [Completion::EMPTY; 1];
        loop {
            if self.queue.poll(&mut polled)? == 0 {
                thread::yield_now();
                continue;
            }
            let slot = self.pair.take(&polled[0]).ok_or("a completion of nothing")?;
            if polled[0].direction == direction {
                return Ok(slot);
            }
            self.outgoing = Some(slot);
        }
    }

    /// Sends a message.
    pub fn send(&mut self) -> Outcome<()> {
        let slot = match self.outgoing.take() {
            Some(slot) => slot,
            None => self.wait(Direction::Sent)?,
        };
        Ok(self.pair.post_send(slot).map_err(|refused| refused.error)?)
    }

    /// Until one has come.
    pub fn recv(&mut self) -> Outcome<()> {
        let slot = self.wait(Direction::Received)?;
        Ok(self.pair.post_receive(slot).map_err(|refused| refused.error)?)
    }
}
