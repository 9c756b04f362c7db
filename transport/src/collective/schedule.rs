//! An operation, compiled: what each rank sends, receives and adds up, in which order, and where it lies meanwhile.

use std::collections::HashMap;
use std::ops::Range;

use super::moves::{self, Algorithm, Chunk, Move, Operation};
use super::span::{Ranks, Span};
use super::wiring::Wiring;

/// Bytes of an element.
pub(super) const ELEMENT_BYTES: usize = size_of::<f32>();

/// Where a term lies. Offsets count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In what this rank brings along.
    Mine(usize),
    /// Between.
    Arena(usize),
    /// In the result.
    Out(usize),
}

/// A node of the sum's tree, of one chunk, that a rank holds at some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Term {
    pub(super) place: Place,
    pub(super) len: usize,
    /// Held from the start.
    pub(super) own: bool,
    /// The sum that it is a part of on this rank.
    pub(super) sum: Option<usize>,
    /// Of use for that sum only, so that it need not be kept.
    pub(super) sole: bool,
}

/// `into = left + right`, all of the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) left: usize,
    pub(super) right: usize,
    pub(super) into: usize,
}

/// Terms that travel together, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) terms: Vec<usize>,
    /// Elements of all of them.
    pub(super) len: usize,
}

/// What one rank does. A message is sent when its terms are held, a sum is formed when both parts are; messages between
/// two ranks keep their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) terms: Vec<Term>,
    pub(super) sums: Vec<Sum>,
    /// By receiver.
    pub(super) sends: Vec<Vec<Message>>,
    /// By sender.
    pub(super) receives: Vec<Vec<Message>>,
    /// From what this rank brings along to the result.
    pub(super) copies: Vec<(Range<usize>, usize)>,
    /// Elements of what this rank brings along, of the room between, of the result.
    pub(super) mine: usize,
    pub(super) arena: usize,
    pub(super) out: usize,
}

/// What an operation costs, whatever the wiring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Payload of all messages.
    pub bytes: u64,
    /// Messages of all ranks.
    pub messages: usize,
    /// Messages on the longest chain of which each needs the one before.
    pub rounds: usize,
}

/// One operation by one algorithm over one wiring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    operation: Operation,
    algorithm: Algorithm,
    programs: Vec<Program>,
    volume: Volume,
    digest: u64,
}

impl Schedule {
    /// Compiles; `None` where the algorithm makes no sense for this operation or wiring.
    pub fn compile(operation: &Operation, algorithm: Algorithm, wiring: &Wiring) -> Option<Schedule> {
        let ranks = wiring.ranks();
        let fits = match operation {
            Operation::AllGather { lens } => lens.len() == ranks,
            Operation::Broadcast { root, .. } => *root < ranks,
            _ => true,
        };
        let chunks = moves::chunks(operation, algorithm, wiring).filter(|_| fits)?;
        let mut compiler = Compiler::new(ranks);
        for chunk in &chunks {
            compiler.chunk(operation, chunk)?;
        }
        Some(compiler.finish(operation, algorithm))
    }

    /// What is done.
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// How.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Whether an all-reduce of `len` elements by it is one frame, of at most `frame`, each way between two ranks: they then fill the
    /// slot that is sent and add up out of the one that is received.
    pub(crate) fn fits_slots(&self, len: usize, frame: usize) -> bool {
        self.algorithm() == Algorithm::Direct && self.ranks() == 2 && len > 0 && len <= frame
    }

    /// How many ranks take part.
    pub fn ranks(&self) -> usize {
        self.programs.len()
    }

    /// What travels.
    pub fn volume(&self) -> Volume {
        self.volume
    }

    /// Messages and their payload bytes that `rank` sends.
    pub fn sent_by(&self, rank: usize) -> (usize, u64) {
        let messages = self.programs.get(rank).into_iter().flat_map(|program| program.sends.iter().flatten());
        messages
            .fold((0, 0), |(count, bytes), message| (count + 1, bytes + (message.len * ELEMENT_BYTES) as u64))
    }

    /// Whether messages go from the one rank to the other.
    pub fn uses(&self, from: usize, to: usize) -> bool {
        let sends = self.programs.get(from).and_then(|program| program.sends.get(to));
        sends.is_some_and(|messages| !messages.is_empty())
    }

    /// The same on all ranks that compiled the same: part of every parcel.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    pub(super) fn program(&self, rank: usize) -> Option<&Program> {
        self.programs.get(rank)
    }
}

/// A message before it is known in which order all are.
struct Draft {
    from: usize,
    to: usize,
    chunk: Range<usize>,
    spans: Vec<Span>,
    round: usize,
    sent: Vec<usize>,
    received: Vec<usize>,
}

struct Compiler {
    programs: Vec<Program>,
    drafts: Vec<Draft>,
}

/// What a rank has of the chunk that is compiled: the term, and the round after which it is there.
type Held = HashMap<Span, (usize, usize)>;

impl Compiler {
    fn new(ranks: usize) -> Compiler {
        let empty = || (0..ranks).map(|_| Vec::new()).collect();
        let program = || Program { sends: empty(), receives: empty(), ..Program::default() };
        Compiler { programs: (0..ranks).map(|_| program()).collect(), drafts: Vec::new() }
    }

    fn chunk(&mut self, operation: &Operation, chunk: &Chunk) -> Option<()> {
        let ranks = self.programs.len();
        let root = Span::root(ranks);
        let result = single(root, chunk.summed)?;
        let (to_mine, to_out) = match operation {
            Operation::AllReduce { .. } | Operation::Broadcast { .. } | Operation::Send { .. } => (0, 0),
            Operation::ReduceScatter { .. } => (0, chunk.range.start),
            Operation::AllGather { .. } => (chunk.range.start, 0),
        };
        let (mine, out) = (chunk.range.start - to_mine, chunk.range.start - to_out);
        let len = chunk.range.len();
        let mut held: Vec<Held> = (0..ranks).map(|_| Held::new()).collect();
        for rank in (0..ranks).filter(|rank| chunk.summed & (1 << rank) != 0) {
            let program = &mut self.programs[rank];
            program.mine = program.mine.max(mine + len);
            let term = Term { place: Place::Mine(mine), len, own: true, sum: None, sole: true };
            held[rank].insert(Span::leaf(rank), (program.terms.len(), 0));
            program.terms.push(term);
        }
        for one in &chunk.moves {
            let spans = root.cover(one.ranks);
            let (mut sent, mut received, mut round) = (Vec::new(), Vec::new(), 0);
            for &span in &spans {
                let (term, since) = self.programs[one.from].resolve(&mut held[one.from], span, len)?;
                self.programs[one.from].terms[term].sole = false;
                sent.push(term);
                round = round.max(since + 1);
            }
            for &span in &spans {
                let there = self.programs[one.to].reserve(len);
                received.push(there);
                if held[one.to].insert(span, (there, round)).is_some() {
                    return None;
                }
            }
            let Move { from, to, .. } = *one;
            self.drafts.push(Draft { from, to, chunk: chunk.range.clone(), spans, round, sent, received });
        }
        for rank in (0..ranks).filter(|rank| chunk.wanted & (1 << rank) != 0) {
            let program = &mut self.programs[rank];
            let (term, _) = program.resolve(&mut held[rank], result, len)?;
            program.out = program.out.max(out + len);
            let term = &mut program.terms[term];
            term.sole = false;
            if term.own {
                program.copies.push((mine..mine + len, out));
            } else {
                term.place = Place::Out(out);
            }
        }
        Some(())
    }

    fn finish(mut self, operation: &Operation, algorithm: Algorithm) -> Schedule {
        // Stable: of one round, in the order of chunks. A message needs only such of lesser rounds, so that this order,
        // kept between each two ranks, never makes one wait for itself.
        self.drafts.sort_by_key(|draft| draft.round);
        let mut digest = Fnv::new();
        digest.add(format!("{operation:?} {algorithm} {}", self.programs.len()).as_bytes());
        let mut volume = Volume::default();
        for Draft { from, to, chunk, spans, round, sent, received } in self.drafts {
            let len = spans.len() * chunk.len();
            volume.bytes += (len * ELEMENT_BYTES) as u64;
            volume.messages += 1;
            volume.rounds = volume.rounds.max(round);
            digest.add(&[from as u8, to as u8]);
            digest.add(&(chunk.start as u64).to_le_bytes());
            digest.add(&(chunk.end as u64).to_le_bytes());
            spans.iter().for_each(|span| digest.add(&[span.first, span.past]));
            self.programs[from].sends[to].push(Message { terms: sent, len });
            self.programs[to].receives[from].push(Message { terms: received, len });
        }
        for program in &mut self.programs {
            program.lay_out();
        }
        Schedule {
            operation: operation.clone(),
            algorithm,
            programs: self.programs,
            volume,
            digest: digest.value,
        }
    }
}

/// The node of the tree that is the sum over `ranks`.
fn single(root: Span, ranks: Ranks) -> Option<Span> {
    match root.cover(ranks)[..] {
        [span] => Some(span),
        _ => None,
    }
}

impl Program {
    /// A term that will lie between, unless it turns out to be a result.
    fn reserve(&mut self, len: usize) -> usize {
        self.terms.push(Term { place: Place::Arena(0), len, own: false, sum: None, sole: true });
        self.terms.len() - 1
    }

    /// The term of `span`, formed of its parts if it is not there; and the round after which it is.
    fn resolve(&mut self, held: &mut Held, span: Span, len: usize) -> Option<(usize, usize)> {
        if let Some(&found) = held.get(&span) {
            return Some(found);
        }
        let (left, right) = span.children()?;
        let (left, since_left) = self.resolve(held, left, len)?;
        let (right, since_right) = self.resolve(held, right, len)?;
        let into = self.reserve(len);
        for part in [left, right] {
            // A node of the tree has one parent.
            self.terms[part].sum = Some(self.sums.len());
        }
        self.sums.push(Sum { left, right, into });
        let found = (into, since_left.max(since_right));
        held.insert(span, found);
        Some(found)
    }

    /// Gives each term between a place of its own.
    fn lay_out(&mut self) {
        for term in &mut self.terms {
            if let Place::Arena(at) = &mut term.place {
                *at = self.arena;
                self.arena += term.len;
            }
        }
    }
}

/// FNV-1a, 64 bits: the same on every machine and for every build.
struct Fnv {
    value: u64,
}

impl Fnv {
    fn new() -> Fnv {
        Fnv { value: 0xcbf2_9ce4_8422_2325 }
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.value = (self.value ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
