//! What is done to one row between the products.

use crate::kernels::activations::{Activations, Form, Int8Block, quantise};
use crate::kernels::attention::{Heads, Span};
use crate::kernels::disjoint::Disjoint;
use crate::kernels::lanes::{Kernel, Lanes};
use crate::kernels::rowwise::{add, rms_norm, rotate, scale};
use crate::kernels::team::Team;
use crate::kv::LayerWriter;

use super::scratch::{Scratch, Turns};

/// Fewer rows than this are not worth the synchronisation.
const SHARED_ROWS: usize = 4;

/// Does something to each row: by all threads if they are many, else by this one.
fn for_each_row(team: &mut Team, rows: usize, work: &(dyn Fn(usize) + Sync)) {
    if rows < SHARED_ROWS {
        (0..rows).for_each(work);
    } else {
        team.for_each(rows, &|row, _| work(row));
    }
}

/// What is done to the residual stream before a product.
#[derive(Clone, Copy)]
pub(super) struct Residual<'a> {
    /// Whether what the last product gave is added first, and the norm that it goes through.
    pub(super) add: Option<Option<&'a [f32]>>,
    pub(super) norm: &'a [f32],
    pub(super) eps: f32,
}

/// Adds to one row of the residual stream, norms it, and stores it in the forms that are wanted.
struct NormRow<'a> {
    residual: Residual<'a>,
    x: &'a mut [f32],
    delta: &'a mut [f32],
    normed: &'a mut [f32],
    forms: RowForms<'a>,
}

/// Where a row goes.
struct RowForms<'a> {
    int8: Option<&'a mut [Int8Block]>,
    f32: Option<&'a mut [f32]>,
}

impl RowForms<'_> {
    #[inline(always)]
    fn store<L: Lanes>(self, lanes: L, row: &[f32]) {
        if let Some(blocks) = self.int8 {
            quantise(lanes, row, blocks);
        }
        if let Some(numbers) = self.f32 {
            numbers.copy_from_slice(row);
        }
    }
}

impl Kernel for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Residual { add: added, norm, eps } = self.residual;
        if let Some(post) = added {
            if let Some(post) = post {
                rms_norm(lanes, self.delta, post, eps);
            }
            add(self.x, self.delta);
        }
        self.normed.copy_from_slice(self.x);
        rms_norm(lanes, self.normed, norm, eps);
        self.forms.store(lanes, self.normed)
    }
}

struct StoreRow<'a> {
    row: &'a [f32],
    forms: RowForms<'a>,
}

impl Kernel for StoreRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        self.forms.store(lanes, self.row)
    }
}

struct AddRow<'a> {
    x: &'a mut [f32],
    delta: &'a mut [f32],
    norm: Option<&'a [f32]>,
    eps: f32,
}

impl Kernel for AddRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if let Some(norm) = self.norm {
            rms_norm(lanes, self.delta, norm, self.eps);
        }
        add(self.x, self.delta);
    }
}

/// The rows of activations as places that several threads fill, each its own.
struct Places<'a> {
    int8: Disjoint<'a, Int8Block>,
    f32: Disjoint<'a, f32>,
    blocks: usize,
    width: usize,
    forms: [Option<Form>; 2],
}

impl<'a> Places<'a> {
    fn of(activations: &'a mut Activations, width: usize, forms: [Option<Form>; 2]) -> Places<'a> {
        activations.set_width(width);
        let (int8, f32, blocks) = activations.places();
        Places { int8: Disjoint::new(int8), f32: Disjoint::new(f32), blocks, width, forms }
    }

    /// # Safety
    /// Nobody else takes the same row meanwhile.
    unsafe fn row(&self, row: usize) -> RowForms<'_> {
        let wants = |form| self.forms.contains(&Some(form));
        // SAFETY: the caller's promise.
        unsafe {
            RowForms {
                int8: wants(Form::Int8).then(|| self.int8.part(row * self.blocks..(row + 1) * self.blocks)),
                f32: wants(Form::F32).then(|| self.f32.part(row * self.width..(row + 1) * self.width)),
            }
        }
    }
}

impl Scratch {
    /// Fills the activations with normed rows of the residual stream: row `index` of them is row `row_of(index)` of the
    /// stream. No two are the same.
    pub(super) fn normed_rows(
        &mut self,
        team: &mut Team,
        residual: Residual<'_>,
        rows: usize,
        row_of: &(dyn Fn(usize) -> usize + Sync),
        forms: [Option<Form>; 2],
    ) {
        let path = team.path();
        let hidden = residual.norm.len();
        let Scratch { x, delta, normed, activations, .. } = self;
        let [x, delta, normed] = [x, delta, normed].map(|buffer| Disjoint::new(buffer));
        let places = Places::of(activations, hidden, forms);
        for_each_row(team, rows, &|index| {
            let row = row_of(index);
            let of_row = row * hidden..(row + 1) * hidden;
            // SAFETY: every index has a row of its own in each buffer.
            let kernel = unsafe {
                NormRow {
                    residual,
                    x: x.part(of_row.clone()),
                    delta: delta.part(of_row),
                    normed: normed.part(index * hidden..(index + 1) * hidden),
                    forms: places.row(index),
                }
            };
            path.run(kernel);
        });
    }

    /// Fills the activations with what attention gave.
    pub(super) fn store_attended(&mut self, team: &mut Team, rows: usize, forms: [Option<Form>; 2]) {
        let path = team.path();
        let width = self.attended_width;
        let Scratch { attended, activations, .. } = self;
        let places = Places::of(activations, width, forms);
        for_each_row(team, rows, &|row| {
            // SAFETY: every row is taken once.
            let forms = unsafe { places.row(row) };
            path.run(StoreRow { row: &attended[row * width..(row + 1) * width], forms });
        });
    }

    /// Adds what the last product gave to the residual stream.
    pub(super) fn add_delta(&mut self, team: &mut Team, rows: usize, norm: Option<&[f32]>, eps: f32) {
        let path = team.path();
        let hidden = self.hidden;
        let [x, delta] = [&mut self.x, &mut self.delta].map(|buffer| Disjoint::new(buffer));
        for_each_row(team, rows, &|row| {
            let of_row = row * hidden..(row + 1) * hidden;
            // SAFETY: every row is taken once.
            let (x, delta) = unsafe { (x.part(of_row.clone()), delta.part(of_row)) };
            path.run(AddRow { x, delta, norm, eps });
        });
    }
}

/// What is done to queries, keys and values before attention.
#[derive(Clone, Copy)]
pub(super) struct Turn<'a> {
    pub(super) heads: Heads,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) q_norm: Option<&'a [f32]>,
    pub(super) k_norm: Option<&'a [f32]>,
    pub(super) eps: f32,
    /// What queries are multiplied with, so that scores are.
    pub(super) scale: f32,
}

/// Biases, norms and turns of one row.
struct TurnRow<'a> {
    turn: Turn<'a>,
    qkv: &'a mut [f32],
    cosines: &'a [f32],
    sines: &'a [f32],
}

impl Kernel for TurnRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Turn { heads: Heads { heads, kv_heads, dim }, bias, q_norm, k_norm, eps, scale: factor } =
            self.turn;
        if let Some(bias) = bias {
            add(self.qkv, bias);
        }
        for (index, head) in self.qkv.chunks_exact_mut(dim).take(heads + kv_heads).enumerate() {
            let is_query = index < heads;
            if let Some(norm) = if is_query { q_norm } else { k_norm } {
                rms_norm(lanes, head, norm, eps);
            }
            rotate(head, self.cosines, self.sines);
            if is_query {
                scale(head, factor);
            }
        }
    }
}

/// Prepares queries, keys and values of all rows (`stride` numbers each) and writes the latter two into the cache.
pub(super) fn turn(
    team: &mut Team,
    turn: &Turn<'_>,
    turns: &Turns,
    spans: &[Span],
    (qkv, stride): (&mut [f32], usize),
    cache: &LayerWriter<'_>,
) {
    let path = team.path();
    let Heads { heads, kv_heads, dim } = turn.heads;
    let rows = spans.last().map_or(0, |span| span.first_row + span.rows);
    let qkv = Disjoint::new(qkv);
    for_each_row(team, rows, &|row| {
        let Some(span) = spans.iter().rfind(|span| span.first_row <= row) else { return };
        let pos = span.pos + row - span.first_row;
        // SAFETY: every row is taken once.
        let qkv = unsafe { qkv.part(row * stride..(row + 1) * stride) };
        let (cosines, sines) = turns.of(row);
        path.run(TurnRow { turn: *turn, qkv, cosines, sines });
        let (keys, values) = qkv[heads * dim..].split_at(kv_heads * dim);
        // SAFETY: every row has a position of its own in a sequence of its own, or behind the other rows of the same.
        unsafe { cache.write(path, span.place, pos, keys, values) };
    });
}
