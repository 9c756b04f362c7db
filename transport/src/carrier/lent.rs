//! A cable's memory in a window: what was lent goes back when the window lets go of it, whichever carrier it has by then.

use std::sync::Arc;

use crate::endpoint::SharedCable;
use crate::rdma::cable::Loan;

/// The payload of one frame, in memory of a cable. Not to be dropped under the cable's lock.
pub(crate) struct Lent {
    cable: Arc<SharedCable>,
    /// `Some` until it is dropped.
    loan: Option<Loan>,
}

impl Lent {
    pub(super) fn new(cable: &Arc<SharedCable>, loan: Loan) -> Lent {
        Lent { cable: cable.clone(), loan: Some(loan) }
    }

    /// The loan, where it is one of this cable.
    pub(super) fn of(&mut self, cable: &Arc<SharedCable>) -> Option<&mut Loan> {
        self.loan.as_mut().filter(|_| Arc::ptr_eq(&self.cable, cable))
    }

    /// The first `len` bytes; none where it is shorter.
    pub(crate) fn bytes(&self, len: usize) -> &[u8] {
        self.loan.as_ref().and_then(|loan| loan.bytes().get(..len)).unwrap_or_default()
    }

    /// How long it is.
    pub(crate) fn len(&self) -> usize {
        self.loan.as_ref().map_or(0, |loan| loan.bytes().len())
    }

    /// All there is room for; none once it was sent.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        self.loan.as_mut().map(Loan::bytes_mut).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(loan) = self.loan.take() {
            self.cable.lock().take_back(loan);
        }
    }
}
