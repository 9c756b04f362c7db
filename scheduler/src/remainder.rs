//! Sharing out whole things in proportion.

/// `units` shared out in proportion to `room` by the method of the largest remainder (Hamilton's), ties to the earlier
/// one; then one to each that got none, from those that have most, as far as they go. Equal shares where nobody has room.
pub(crate) fn largest_remainder(units: usize, room: &[i128]) -> Vec<usize> {
    // 64 bits hold any room there really is; the product below then fits 128.
    let mut weights: Vec<u128> =
        room.iter().map(|room| u64::try_from((*room).max(0)).unwrap_or(u64::MAX).into()).collect();
    if weights.iter().all(|weight| *weight == 0) {
        weights.fill(1);
    }
    let sum: u128 = weights.iter().sum();
    let shares = weights.iter().map(|weight| units as u128 * weight);
    let mut counts: Vec<usize> = Vec::with_capacity(room.len());
    let mut remainders: Vec<(std::cmp::Reverse<u128>, usize)> = Vec::with_capacity(room.len());
    for (index, share) in shares.enumerate() {
        counts.push(usize::try_from(share / sum).unwrap_or(units));
        remainders.push((std::cmp::Reverse(share % sum), index));
    }
    remainders.sort_unstable();
    let left = units.saturating_sub(counts.iter().sum());
    for (_, index) in remainders.into_iter().take(left) {
        if let Some(count) = counts.get_mut(index) {
            *count += 1;
        }
    }
    while let Some(empty) = counts.iter().position(|count| *count == 0) {
        let most =
            counts.iter().enumerate().max_by_key(|(index, count)| (**count, std::cmp::Reverse(*index)));
        let Some(most) = most.filter(|(_, count)| **count > 1).map(|(index, _)| index) else { break };
        for (index, change) in [(empty, 1), (most, -1)] {
            if let Some(count) = counts.get_mut(index) {
                *count = count.saturating_add_signed(change);
            }
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_the_largest_remainder() {
        assert_eq!(largest_remainder(30, &[50, 30, 20]), [15, 9, 6]);
        assert_eq!(largest_remainder(10, &[1, 1, 1]), [4, 3, 3]);
        assert_eq!(largest_remainder(7, &[10, 20, 40]), [1, 2, 4]);
        assert_eq!(largest_remainder(4, &[100, 0, -5]), [2, 1, 1]);
        assert_eq!(largest_remainder(3, &[0, 0, 0]), [1, 1, 1]);
        assert_eq!(largest_remainder(2, &[1, 1, 1]), [1, 1, 0]);
        assert_eq!(largest_remainder(0, &[1, 1]), [0, 0]);
    }
}
