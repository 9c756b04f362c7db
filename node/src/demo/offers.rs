//! How little each node may offer so that all of them are needed, and still enough.
//!
//! Asked of the scheduler's own placement rules, so that what is computed here is what will be decided there.

use shoal_scheduler::placement::place;
use shoal_scheduler::{
    Cut, Footprint, KvType, NoLinks, NodeId, NodeOffer, Parallel, PlanRequest, Reach, Topology,
};

/// Offers differ by this much from node to node, in per mille, so that the split by memory shows.
const STEP_PER_MILLE: u64 = 30;
/// Offers are whole megabytes where that still holds.
const ROUND_BYTES: u64 = 1_000_000;

/// Offers for `nodes` nodes by which the model fits on all of them together, and on no fewer where that is possible (each
/// offer has to hold the output head too, which with many nodes is more than a part of the layers), but in any case on no
/// two where there are more; `None` where there are none.
pub fn needing_all(footprint: &Footprint, nodes: usize, context: u32, slots: u16) -> Option<Vec<u64>> {
    let holds = |offers: &[u64]| fits(footprint, offers, Parallel::Auto, context, slots);
    let all = u16::try_from(nodes).ok().map(Parallel::Pipeline)?;
    let splits = |offers: &[u64]| fits(footprint, offers, all, context, slots);
    let enough = least(|offer| splits(&vec![offer; nodes]))?;
    let too_much = |fewer: usize| match fewer {
        0 => enough.checked_add(enough / 2),
        fewer => least(|offer| holds(&vec![offer; fewer])),
    };
    let needs_more_than = |fewer: usize, offers: &[u64]| {
        let mut most = offers.to_vec();
        most.sort_unstable_by(|a, b| b.cmp(a));
        splits(offers) && !most.get(..fewer).is_some_and(|most| !most.is_empty() && holds(most))
    };
    let fewest = [nodes.checked_sub(1)?, (nodes - 1).min(2)];
    fewest.into_iter().find_map(|fewer| {
        // In the middle, so that neither side is a matter of a few bytes.
        let middle = enough.checked_add(too_much(fewer)?.checked_sub(enough)? / 2)?;
        candidates(middle, nodes as u64)?.into_iter().find(|offers| needs_more_than(fewer, offers))
    })
}

/// Offers around `middle`, the nicest first: graded and in whole megabytes.
fn candidates(middle: u64, nodes: u64) -> Option<[Vec<u64>; 4]> {
    // The first is above the middle, the last below.
    let graded: Option<Vec<u64>> = (0..nodes)
        .map(|index| {
            let above = (nodes - 1 - index) * STEP_PER_MILLE / 2;
            let below = index * STEP_PER_MILLE / 2;
            middle.checked_add(middle / 1000 * above)?.checked_sub(middle / 1000 * below)
        })
        .collect();
    let (graded, even) = (graded?, vec![middle; usize::try_from(nodes).ok()?]);
    let round =
        |offers: &Vec<u64>| offers.iter().map(|o| o / ROUND_BYTES * ROUND_BYTES).collect::<Vec<u64>>();
    Some([round(&graded), graded, round(&even), even])
}

/// The least offer by which the model fits when it is split over exactly `nodes` nodes, with a quarter more.
pub fn ample(footprint: &Footprint, nodes: usize, context: u32, slots: u16) -> Option<u64> {
    let all = u16::try_from(nodes).ok().map(Parallel::Pipeline)?;
    let enough = least(|offer| fits(footprint, &vec![offer; nodes], all, context, slots))?;
    enough.checked_add(enough / 4)
}

/// Whether the model fits on nodes with these offers and nothing else on them.
fn fits(footprint: &Footprint, offers: &[u64], parallel: Parallel, context: u32, slots: u16) -> bool {
    let node = |(index, offer): (usize, &u64)| {
        Some(NodeOffer {
            id: NodeId::try_from(format!("node{index:04}")).ok()?,
            name: String::new(),
            alive: true,
            offered_bytes: *offer,
            memory_bytes: None,
            reach: Reach::All,
            speed: None,
        })
    };
    let nodes: Option<Vec<NodeOffer>> = offers.iter().enumerate().map(node).collect();
    let Some(nodes) = nodes else { return false };
    let request = PlanRequest {
        footprint: footprint.clone(),
        context: Some(context),
        slots,
        kv_type: KvType::default(),
        parallel,
        cut: Cut::Memory,
        nodes: Vec::new(),
    };
    place(&Topology { nodes, ..Topology::default() }, &NoLinks, &[], &request).is_ok()
}

/// The least number of bytes for which `enough` holds, which holds for all above too.
fn least(enough: impl Fn(u64) -> bool) -> Option<u64> {
    let mut high = 1 << 20;
    while !enough(high) {
        high = high.checked_mul(2).filter(|bytes| *bytes < 1 << 50)?;
    }
    let mut low = 0;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// About SmolLM2-135M in Q4_1, with rings and a tokenizer.
    fn small() -> Footprint {
        Footprint {
            layer_bytes: vec![2_220_000; 30],
            embedding_bytes: 30_081_024,
            head_bytes: 30_083_328,
            tied: true,
            kv_bytes_per_token_layer: 768,
            scratch_base_bytes: 24_000_000,
            scratch_bytes_per_slot: 300_000,
            scratch_bytes_per_context: 100,
            max_context: 8192,
            hidden: 576,
            idle_layer_bytes: 0,
            divisible: None,
        }
    }

    #[test]
    fn every_node_is_needed_and_all_together_suffice() {
        for (nodes, contexts) in [(1, [128, 1024, 8192]), (2, [128, 1024, 8192]), (3, [128, 1024, 8192])] {
            for context in contexts {
                let offers = needing_all(&small(), nodes, context, 2).unwrap();
                assert_eq!(offers.len(), nodes);
                let all = Parallel::Pipeline(nodes as u16);
                assert!(fits(&small(), &offers, all, context, 2), "{nodes} {context} {offers:?}");
                for left_out in 0..nodes {
                    let mut fewer = offers.clone();
                    fewer.remove(left_out);
                    assert!(
                        !fits(&small(), &fewer, Parallel::Auto, context, 2),
                        "{nodes} {context} {offers:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn of_many_nodes_no_two_suffice() {
        for nodes in 4..=10 {
            for context in [128, 1024, 8192] {
                let offers = needing_all(&small(), nodes, context, 2).unwrap();
                assert!(fits(&small(), &offers, Parallel::Pipeline(nodes as u16), context, 2));
                let mut most = offers;
                most.sort_unstable_by(|a, b| b.cmp(a));
                assert!(
                    !fits(&small(), &most[..2], Parallel::Auto, context, 2),
                    "{nodes} {context} {most:?}"
                );
            }
        }
    }

    #[test]
    fn three_differ_and_each_has_some_room_to_spare() {
        let offers = needing_all(&small(), 3, 1024, 2).unwrap();
        assert!(offers[0] > offers[1] && offers[1] > offers[2], "{offers:?}");
        let tighter: Vec<u64> = offers.iter().map(|offer| offer - offer / 50).collect();
        assert!(fits(&small(), &tighter, Parallel::Pipeline(3), 1024, 2), "{offers:?}");
    }

    #[test]
    fn more_nodes_than_layers_cannot_all_be_needed() {
        assert_eq!(needing_all(&small(), 31, 128, 1), None);
        assert_eq!(needing_all(&small(), 0, 128, 1), None);
    }

    #[test]
    fn ample_is_enough() {
        for nodes in 1..=4 {
            let offer = ample(&small(), nodes, 1024, 1).unwrap();
            assert!(fits(&small(), &vec![offer; nodes], Parallel::Pipeline(nodes as u16), 1024, 1));
        }
    }
}
