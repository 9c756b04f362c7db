//! What a rank of a tensor-parallel group asks of the others.
//!
//! The engine knows no network: whoever runs a shard gives it a [`Collective`]. What each rank adds up is written straight
//! into the room that the collective offers, which may be a slot of the network's.

#[cfg(test)]
pub(crate) mod local;

/// Why the ranks of a group could not come together; the instance ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// The instance is being stopped.
    #[error("this rank was asked to stop")]
    Stopped,
    /// A rank is gone, too late, or says something else than this one.
    #[error("the ranks of this stage could not exchange their sums: {0}")]
    Broken(String),
}

/// The ranks that share a stage, as one of them sees them. All of them make the same calls in the same order.
pub trait Collective: Send {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many there are.
    fn ranks(&self) -> usize;

    /// Room for `len` numbers, to be filled with what this rank contributes to the next [`Collective::all_reduce`]. What
    /// was there is of no meaning.
    fn room(&mut self, len: usize) -> Result<&mut [f32], CollectiveError>;

    /// Fills `sums` with the sums over all ranks of what they put into their rooms; as long as the room. All ranks get the
    /// same bits, and these depend on nothing but the contributions and the number of ranks.
    fn all_reduce(&mut self, sums: &mut [f32]) -> Result<(), CollectiveError>;

    /// Fills `all` (cleared first) with the contributions of all ranks in their order. `lens` are their lengths in
    /// bytes, known to everybody; `mine` has this rank's.
    fn all_gather(&mut self, mine: &[u8], lens: &[usize], all: &mut Vec<u8>) -> Result<(), CollectiveError>;
}
