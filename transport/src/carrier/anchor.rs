//! The connection beside a share of a cable: it carries nothing, and says whether the other side is there.

use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// How often it is looked at while somebody reads or writes.
const LOOK: Duration = Duration::from_millis(1);
/// The same while nobody does.
const LOOK_ASLEEP: Duration = Duration::from_millis(20);
/// How long what was sent before its end may take to come.
pub(crate) const GRACE: Duration = Duration::from_millis(100);

/// See the module's text.
pub(crate) struct Anchor {
    /// `None` until both sides agree. It does not block.
    connection: Option<TcpStream>,
    looked: Instant,
    hung_up: Option<Instant>,
}

impl Anchor {
    /// As long as nothing is agreed.
    pub(crate) fn to_come() -> Anchor {
        Anchor { connection: None, looked: Instant::now(), hung_up: None }
    }

    /// Both sides agree, on this.
    pub(crate) fn set(&mut self, connection: TcpStream) {
        self.connection = Some(connection);
    }

    /// Since when the other side says no more.
    pub(crate) fn hung_up(&self) -> Option<Instant> {
        self.hung_up
    }

    /// By when it wants to be looked at, although nobody reads or writes.
    pub(crate) fn look_by(&self) -> Instant {
        self.looked + LOOK_ASLEEP
    }

    /// Looks, now and then. An error where it broke; [`ErrorKind::InvalidData`] where something came.
    pub(crate) fn look(&mut self, now: Instant) -> io::Result<()> {
        if self.hung_up.is_none() && now < self.looked + LOOK {
            return Ok(());
        }
        self.looked = now;
        let Some(mut connection) = self.worth_watching() else { return Ok(()) };
        match connection.read(&mut [0]) {
            Ok(0) => {
                self.hung_up = Some(now);
                Ok(())
            }
            Ok(_) => Err(io::Error::new(ErrorKind::InvalidData, "bytes beside the cable")),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn worth_watching(&self) -> Option<&TcpStream> {
        self.connection.as_ref().filter(|_| self.hung_up.is_none())
    }

    /// Its descriptor, readable when the other side is gone, until that was seen.
    pub(crate) fn watched(&self) -> Option<BorrowedFd<'_>> {
        self.worth_watching().map(AsFd::as_fd)
    }

    /// Tells the other side that nothing follows.
    pub(crate) fn say_no_more(&self) {
        if let Some(connection) = &self.connection {
            // An error means that the other side is gone, as the next look will say.
            let _ = connection.shutdown(Shutdown::Write);
        }
    }
}
