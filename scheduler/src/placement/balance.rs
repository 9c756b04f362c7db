//! Cutting layers by speed: the slowest stage of a pipeline that is kept full sets its pace.

use super::cost::Pace;
use super::search::Shape;
use super::split::Split;

/// Halvings of the time within which the least is looked for: more than the bits of what was measured.
const HALVINGS: usize = 40;

/// The shape with its layers cut so that the slowest stage takes the least time that memory allows. `paces` are the stages'.
pub(super) fn by_speed(shape: Shape, paces: &[Pace]) -> Shape {
    let stages = shape.groups.len();
    if stages < 2 || paces.len() != stages {
        return shape;
    }
    let of_range = |(pace, range): (&Pace, &std::ops::Range<u32>)| {
        pace.seconds(range.start as usize, range.end as usize)
    };
    let slowest = |split: &Split| paces.iter().zip(&split.layers).map(of_range).fold(0.0, f64::max);
    let (mut low, mut high) = (0.0, slowest(&shape.split));
    let mut best = None;
    for _ in 0..HALVINGS {
        let middle = low + (high - low) / 2.0;
        match within(&shape, paces, middle) {
            Some(counts) => (high, best) = (middle, Some(counts)),
            None => low = middle,
        }
    }
    match best {
        Some(counts) => Shape { split: Split::of_counts(&counts, vec![0; stages]), ..shape },
        None => shape,
    }
}

/// Layers of each stage such that none takes longer than `seconds` and each fits: every stage takes as many as it may, which
/// leaves the fewest to those behind it.
fn within(shape: &Shape, paces: &[Pace], seconds: f64) -> Option<Vec<usize>> {
    let (stages, layers) = (shape.groups.len(), shape.groups.first()?.layers());
    let mut counts = Vec::with_capacity(stages);
    let mut start = 0;
    for (index, (group, pace)) in shape.groups.iter().zip(paces).enumerate() {
        let behind = stages - index - 1;
        let most = layers.checked_sub(start + behind)?;
        // A last stage has all that is left; it has more to read than others for the same layers.
        let least = if behind == 0 { most } else { 1 };
        let may = |count: &usize| {
            let end = start + count;
            pace.seconds(start, end) <= seconds && group.excess(index, stages, start, end) <= 0
        };
        let count = (least.max(1)..=most).take_while(may).last()?;
        counts.push(count);
        start += count;
    }
    Some(counts)
}
