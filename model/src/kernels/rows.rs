//! What is done to one row between the products.

use super::activations::{Activations, Form, Int8Block, quantise};
use super::attention::{Heads, Span};
use super::cache::LayerWriter;
use super::disjoint::Disjoint;
use super::lanes::{Kernel, Lanes};
use super::rowwise::{add, rms_norm, rotate, scale};
use super::team::Team;

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
pub(crate) struct Residual<'a> {
    /// Whether what the last product gave is added first, and the norm that it goes through.
    pub(crate) add: Option<Option<&'a [f32]>>,
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
}

/// Adds to one row of the residual stream.
struct AddRow<'a> {
    x: &'a mut [f32],
    delta: &'a mut [f32],
    /// What is added goes through it.
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

/// Norms one row and stores it in the forms that are wanted.
struct NormRow<'a> {
    x: &'a [f32],
    norm: &'a [f32],
    eps: f32,
    normed: &'a mut [f32],
    forms: RowForms<'a>,
}

impl Kernel for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        self.normed.copy_from_slice(self.x);
        rms_norm(lanes, self.normed, self.norm, self.eps);
        self.forms.store(lanes, self.normed);
    }
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

/// Adds to rows of the residual stream `x` and fills the activations with the normed ones.
pub(crate) fn add_and_norm(
    team: &mut Team,
    Residual { add, norm, eps }: Residual<'_>,
    [x, delta, normed]: [&mut [f32]; 3],
    (activations, forms): (&mut Activations, [Option<Form>; 2]),
    rows: usize,
) {
    let path = team.path();
    let hidden = norm.len();
    let [x, delta, normed] = [x, delta, normed].map(Disjoint::new);
    let places = Places::of(activations, hidden, forms);
    for_each_row(team, rows, &|row| {
        let of_row = row * hidden..(row + 1) * hidden;
        // SAFETY: every row is taken once.
        let (x, delta, normed, forms) = unsafe {
            (x.part(of_row.clone()), delta.part(of_row.clone()), normed.part(of_row), places.row(row))
        };
        if let Some(post) = add {
            path.run(AddRow { x, delta, norm: post, eps });
        }
        path.run(NormRow { x, norm, eps, normed, forms });
    });
}

/// Fills the activations with some rows of the residual stream, normed.
pub(crate) fn norm_some(
    team: &mut Team,
    (norm, eps): (&[f32], f32),
    (x, which): (&[f32], &[usize]),
    normed: &mut [f32],
    (activations, forms): (&mut Activations, [Option<Form>; 2]),
) {
    let path = team.path();
    let hidden = norm.len();
    let normed = Disjoint::new(normed);
    let places = Places::of(activations, hidden, forms);
    for_each_row(team, which.len(), &|index| {
        let row = which[index];
        // SAFETY: every index is taken once.
        let (normed, forms) =
            unsafe { (normed.part(index * hidden..(index + 1) * hidden), places.row(index)) };
        path.run(NormRow { x: &x[row * hidden..(row + 1) * hidden], norm, eps, normed, forms });
    });
}

/// Fills the activations with rows as they are.
pub(crate) fn store(
    team: &mut Team,
    (source, width): (&[f32], usize),
    (activations, forms): (&mut Activations, [Option<Form>; 2]),
    rows: usize,
) {
    let path = team.path();
    let places = Places::of(activations, width, forms);
    for_each_row(team, rows, &|row| {
        // SAFETY: every row is taken once.
        let forms = unsafe { places.row(row) };
        path.run(StoreRow { row: &source[row * width..(row + 1) * width], forms });
    });
}

/// Adds `delta` to rows of the residual stream, through a norm if there is one.
pub(crate) fn add_rows(
    team: &mut Team,
    [x, delta]: [&mut [f32]; 2],
    (norm, eps): (Option<&[f32]>, f32),
    (rows, hidden): (usize, usize),
) {
    let path = team.path();
    let [x, delta] = [x, delta].map(Disjoint::new);
    for_each_row(team, rows, &|row| {
        let of_row = row * hidden..(row + 1) * hidden;
        // SAFETY: every row is taken once.
        let (x, delta) = unsafe { (x.part(of_row.clone()), delta.part(of_row)) };
        path.run(AddRow { x, delta, norm, eps });
    });
}

/// Cosines and sines of the angles by which each row's heads are turned.
pub(crate) struct Turns {
    cosines: Vec<f32>,
    sines: Vec<f32>,
    pairs: usize,
}

impl Turns {
    /// Room for so many rows of heads with so many pairs.
    pub(crate) fn new(rows: usize, pairs: usize) -> Turns {
        Turns { cosines: Vec::with_capacity(rows * pairs), sines: Vec::with_capacity(rows * pairs), pairs }
    }

    /// Computes the angles of all rows' positions; radians per position for each pair.
    pub(crate) fn set(&mut self, spans: &[Span], frequencies: &[f64]) {
        self.cosines.clear();
        self.sines.clear();
        for pos in spans.iter().flat_map(|span| span.pos..span.pos + span.rows) {
            for frequency in frequencies {
                let (sin, cos) = (pos as f64 * frequency).sin_cos();
                self.cosines.push(cos as f32);
                self.sines.push(sin as f32);
            }
        }
    }

    fn of(&self, row: usize) -> (&[f32], &[f32]) {
        let pairs = row * self.pairs..(row + 1) * self.pairs;
        (&self.cosines[pairs.clone()], &self.sines[pairs])
    }
}

/// What is done to queries, keys and values before attention.
#[derive(Clone, Copy)]
pub(crate) struct Turn<'a> {
    pub(crate) heads: Heads,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) q_norm: Option<&'a [f32]>,
    pub(crate) k_norm: Option<&'a [f32]>,
    pub(crate) eps: f32,
    /// What queries are multiplied with, so that scores are.
    pub(crate) scale: f32,
    /// What a dimension of a KV head's keys is divided by, and of its queries multiplied with: scores stay what they are, and
    /// keys that share a factor in the cache become alike in size.
    pub(crate) key_sizes: Option<&'a [f32]>,
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
        let Turn { heads: shape, bias, q_norm, k_norm, eps, scale: factor, key_sizes } = self.turn;
        let Heads { heads, kv_heads, dim, .. } = shape;
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
            if let Some(sizes) = key_sizes {
                let kv_head = if is_query { shape.kv_head_of(index) } else { index - heads };
                let sizes = &sizes[kv_head * dim..(kv_head + 1) * dim];
                match is_query {
                    true => head.iter_mut().zip(sizes).for_each(|(element, size)| *element *= size),
                    false => head.iter_mut().zip(sizes).for_each(|(element, size)| *element /= size),
                }
            }
        }
    }
}

/// Prepares queries, keys and values of all rows (`stride` numbers each) and writes the latter two into the cache.
pub(crate) fn turn(
    team: &mut Team,
    turn: &Turn<'_>,
    turns: &Turns,
    spans: &[Span],
    (qkv, stride): (&mut [f32], usize),
    cache: &LayerWriter<'_>,
) {
    let path = team.path();
    let Heads { heads, kv_heads, dim, .. } = turn.heads;
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
