//! Placements and the reasons against them, from the scheduler's words to the documents of the API.

use shoal_scheduler as scheduler;
use shoal_web::api;

/// The stages of a placement as a plan shows them.
pub fn stages(stages: &[scheduler::Stage]) -> Vec<api::PlanStage> {
    let stage = |(index, stage): (usize, &scheduler::Stage)| api::PlanStage {
        index: index as u32,
        layers: stage.layers.clone().into(),
        ranks: stage
            .ranks
            .iter()
            .enumerate()
            .map(|(rank, node)| {
                let bytes = stage.of_rank(rank);
                api::PlanRank {
                    rank: rank as u32,
                    node: node.to_string(),
                    weights_bytes: bytes.weights_bytes,
                    kv_bytes: bytes.kv_bytes,
                    scratch_bytes: bytes.scratch_bytes,
                }
            })
            .collect(),
    };
    stages.iter().enumerate().map(stage).collect()
}

/// What a model needs at a context and a count of slots.
fn needs(needs: &scheduler::Needs) -> api::Needs {
    api::Needs {
        layer_bytes: needs.layer_bytes,
        embedding_bytes: needs.embedding_bytes,
        head_bytes: needs.head_bytes,
        kv_bytes: needs.kv_bytes,
        scratch_bytes: needs.scratch_bytes,
    }
}

/// A preview of `model` as the document of the API.
pub fn plan(
    model: &str,
    digest: &str,
    kv_type: scheduler::KvType,
    preview: &scheduler::Preview,
) -> api::Plan {
    let alternative = |other: &scheduler::Alternative| api::Alternative {
        parallel: other.parallel.to_string(),
        stages: stages(&other.stages),
        predicted_tokens_per_s: other.predicted_s.map(tokens_per_s),
    };
    let (placed, near, reason) = match &preview.outcome {
        Ok(placed) => (stages(&placed.stages), Vec::new(), None),
        Err(why) => {
            let fix = why.nearest.first().map(|near| near.text.clone());
            let reason = api::Reason { code: code(&why.code), message: why.text.clone(), fix };
            (Vec::new(), nearest(&why.nearest), Some(reason))
        }
    };
    api::Plan {
        schema: api::Schema::new(),
        model: model.to_owned(),
        digest: digest.to_owned(),
        context: preview.needs.context,
        slots: preview.needs.slots,
        kv_type: self::kv_type(kv_type),
        fits: preview.outcome.is_ok(),
        reason,
        needs: needs(&preview.needs),
        stages: placed,
        predicted_tokens_per_s: preview.predicted_s.map(tokens_per_s),
        alternatives: preview.alternatives.iter().map(alternative).collect(),
        nodes: nodes(&preview.nodes),
        nearest: near,
    }
}

/// Of one sequence, where a token takes so long.
pub fn tokens_per_s(seconds: f64) -> f64 {
    1.0 / seconds.max(f64::MIN_POSITIVE)
}

/// A type of cache in the API's words.
pub fn kv_type(kv_type: scheduler::KvType) -> api::KvType {
    match kv_type {
        scheduler::KvType::F16 => api::KvType::F16,
        scheduler::KvType::Q8 => api::KvType::Q8,
    }
}

/// Each node's part in a plan, or what it lacks.
pub fn nodes(nodes: &[scheduler::NodeFit]) -> Vec<api::PlanNode> {
    let node = |fit: &scheduler::NodeFit| {
        // One that is gone, or not needed, needs nothing that could be compared.
        let has_part = matches!(fit.code, scheduler::NodeFitCode::Fits | scheduler::NodeFitCode::TooSmall);
        api::PlanNode {
            id: fit.id.to_string(),
            name: fit.name.clone(),
            offered_bytes: fit.offered_bytes,
            used_bytes: fit.used_bytes,
            needed_bytes: has_part.then_some(fit.needed_bytes),
            missing_bytes: has_part.then_some(fit.missing_bytes),
            code: code(&fit.code),
            text: fit.text.clone(),
        }
    };
    nodes.iter().map(node).collect()
}

/// The nearest changes after which it would fit.
pub fn nearest(nearest: &[scheduler::Nearest]) -> Vec<api::Nearest> {
    let change = |change| match change {
        scheduler::Change::Context => api::Change::Context,
        scheduler::Change::Slots => api::Change::Slots,
        scheduler::Change::Offer => api::Change::Offer,
        scheduler::Change::Node => api::Change::Node,
    };
    let one = |near: &scheduler::Nearest| api::Nearest {
        change: change(near.change),
        node: near.node.as_ref().map(ToString::to_string),
        value: Some(near.value),
        text: near.text.clone(),
    };
    nearest.iter().map(one).collect()
}

/// The reasons against a placement.
pub fn why_not(why: &scheduler::NoPlacement) -> api::WhyNot {
    api::WhyNot { nodes: nodes(&why.nodes), nearest: nearest(&why.nearest) }
}

/// The stable word of an enum that serializes as one.
pub fn code<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_value(value).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_a_part_needs_and_lacks_nothing_that_is_known() {
        let fit = |code, needed_bytes, missing_bytes| scheduler::NodeFit {
            id: scheduler::NodeId::try_from("n".to_owned()).unwrap(),
            name: "n".to_owned(),
            offered_bytes: 8,
            used_bytes: 0,
            needed_bytes,
            missing_bytes,
            code,
            text: String::new(),
        };
        use scheduler::NodeFitCode as Code;
        for code in [Code::Gone, Code::Spare, Code::NoShards, Code::NotSelected, Code::NoRoute] {
            let node = nodes(&[fit(code, 0, 0)]).remove(0);
            assert_eq!((node.needed_bytes, node.missing_bytes), (None, None), "{code:?}");
        }
        let found = nodes(&[fit(Code::Fits, 5, 0), fit(Code::TooSmall, 9, 1)]);
        let found: Vec<_> = found.iter().map(|node| (node.needed_bytes, node.missing_bytes)).collect();
        assert_eq!(found, [(Some(5), Some(0)), (Some(9), Some(1))]);
    }
}
