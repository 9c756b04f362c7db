//! Looking for a placement: how many nodes, which context.

use super::balance::by_speed;
use super::cost::{Pace, Predictor};
use super::load::{Group, Loads, Sharing};
use super::pool::Pool;
use super::split::{Split, split};
use crate::{Cut, Parallel, PlanRequest};

/// Context that an instance gets where nobody said otherwise, if model and memory allow, in tokens.
pub const DEFAULT_CONTEXT: u32 = 4096;

/// Least context that is chosen for somebody who named none, in tokens: with less a model answers nothing useful, and
/// "it does not fit" is the better answer. Who asks for less gets less.
pub const LEAST_DEFAULT_CONTEXT: u32 = 128;

/// A way to place a model: the groups in the order of stages, and the layers of each.
pub(super) struct Shape {
    pub(super) groups: Vec<Group>,
    pub(super) split: Split,
}

/// What is looked for, and where.
#[derive(Clone, Copy)]
pub(super) struct Search<'a> {
    pub(super) pool: &'a Pool<'a>,
    pub(super) request: &'a PlanRequest,
    /// By what layers are cut and shared out for speed; without it memory decides.
    predictor: Option<&'a Predictor<'a>>,
}

/// The contexts to consider: from the least that is acceptable to the one wanted.
pub(super) fn contexts(request: &PlanRequest) -> (u32, u32) {
    match request.context {
        Some(context) => (context, context),
        None => {
            let wanted = request.footprint.max_context.min(DEFAULT_CONTEXT);
            (wanted.min(LEAST_DEFAULT_CONTEXT), wanted)
        }
    }
}

/// The numbers of stages that the request allows, the first to try first.
pub(super) fn stage_counts(pool: &Pool<'_>, request: &PlanRequest) -> std::ops::RangeInclusive<usize> {
    let ranks = usize::from(request.parallel.ranks()).max(1);
    let most = (pool.largest_team() / ranks).min(request.footprint.layer_bytes.len());
    let (least, most) = match request.parallel {
        Parallel::Auto => (1, most),
        Parallel::Pipeline(stages) | Parallel::Tensor { stages, .. } => {
            (stages.into(), most.min(stages.into()))
        }
    };
    least..=most
}

impl<'a> Search<'a> {
    /// By memory alone.
    pub(super) fn by_memory(pool: &'a Pool<'a>, request: &'a PlanRequest) -> Self {
        Self { pool, request, predictor: None }
    }

    /// By what is predicted, unless the request wants otherwise.
    pub(super) fn new(pool: &'a Pool<'a>, request: &'a PlanRequest, predictor: &'a Predictor<'a>) -> Self {
        Self { pool, request, predictor: (request.cut != Cut::Memory).then_some(predictor) }
    }

    /// The same among other candidates.
    pub(super) fn among(self, pool: &'a Pool<'a>) -> Self {
        Self { pool, ..self }
    }

    /// The context and placement that the request gets.
    pub(super) fn best(&self) -> Option<(u32, Shape)> {
        let (least, wanted) = contexts(self.request);
        if let Some(shape) = self.at(wanted, self.request.slots) {
            return Some((wanted, shape));
        }
        let fits = |context: u64| narrow(context).is_some_and(|c| self.at(c, self.request.slots).is_some());
        let context = narrow(largest(least.into()..=u64::from(wanted).saturating_sub(1), fits)?)?;
        self.at(context, self.request.slots).map(|shape| (context, shape))
    }

    /// A placement at exactly this context and number of slots: on the fewest nodes that fit.
    pub(super) fn at(&self, context: u32, slots: u16) -> Option<Shape> {
        let loads = Loads::new(&self.request.footprint, context, slots);
        let ranks = usize::from(self.request.parallel.ranks()).max(1);
        stage_counts(self.pool, self.request).find_map(|stages| self.of_stages(&loads, stages, ranks))
    }

    /// A placement on exactly this many stages of so many ranks.
    pub(super) fn of_stages(&self, loads: &Loads<'_>, stages: usize, ranks: usize) -> Option<Shape> {
        let needed = if ranks == 1 { loads.of(&[1])?.first()?.total(stages) } else { 0 };
        self.pool.teams_of(stages * ranks).find_map(|members| {
            if self.pool.free(&members).iter().map(|bytes| u128::from(*bytes)).sum::<u128>() < needed {
                return None;
            }
            self.shapes(loads, &members, ranks).next()
        })
    }

    /// The ways in which these members, so many ranks each stage, hold the model.
    pub(super) fn shapes(
        &self,
        loads: &Loads<'_>,
        members: &[usize],
        ranks: usize,
    ) -> impl Iterator<Item = Shape> {
        let ways: &[Sharing] =
            if ranks == 1 { &[Sharing::Even] } else { &[Sharing::Speed, Sharing::Even, Sharing::Memory] };
        ways.iter().filter_map(move |sharing| {
            let groups = loads.groups(self.pool, self.predictor, members, ranks, *sharing)?;
            let split = split(&groups).filter(Split::fits)?;
            let shape = Shape { groups, split };
            match self.paces(&shape) {
                Some(paces) => Some(by_speed(shape, &paces)),
                None => Some(shape),
            }
        })
    }

    /// The paces of its stages, where those are to cut its layers.
    fn paces(&self, shape: &Shape) -> Option<Vec<Pace>> {
        let predictor = self.predictor?;
        let known =
            || predictor.seconds_of(self.pool, shape).is_some() && !predictor.one_machine(self.pool, shape);
        if self.request.cut == Cut::Auto && !known() {
            return None;
        }
        predictor.paces(self.pool, &shape.groups)
    }
}

/// The largest of `values` for which `fits` (which, true for a value, is true for all smaller ones) holds.
pub(super) fn largest(
    values: std::ops::RangeInclusive<u64>,
    mut fits: impl FnMut(u64) -> bool,
) -> Option<u64> {
    let (mut low, mut high) = values.into_inner();
    if low > high || !fits(low) {
        return None;
    }
    while low < high {
        let middle = high - (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    Some(low)
}

pub(super) fn narrow<T: TryFrom<u64>>(value: u64) -> Option<T> {
    T::try_from(value).ok()
}
