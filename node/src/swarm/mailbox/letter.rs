//! A letter and its answer as they travel, and the signatures that hold from end to end.
//!
//! Over a direct connection nothing is signed: the connection says who speaks. What a member between carries is signed by
//! its sender (the head but for the hops, and the body), and the answer by who answers, over the letter's id. So a member
//! between can lose or delay a letter and read it, and cannot change it or write one in another's name.

use serde::{Deserialize, Serialize};
use shoal_scheduler::NodeId;

use super::{MAX_BODY, NoWay};
use crate::identity::{self, Identity};
use crate::wire::{Reader, WireError, Writer};

/// The most bytes of a whole letter: a body and what is around it.
pub const MAX_FRAME: usize = MAX_BODY + 2048;

const HEAD: u16 = 1;
const BODY: u16 = 2;
const SIGNATURE: u16 = 3;
/// Stands in front of what a sender signs.
const LETTER: &[u8] = b"shoal letter 0\0";
/// Stands in front of what is signed of an answer.
const ANSWER: &[u8] = b"shoal answer 0\0";

/// What stands in front of a letter's body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Drawn by the sender, the number of its run in the upper half and a count in the lower; no letter has that of another.
    pub id: u128,
    pub from: NodeId,
    pub to: NodeId,
    /// How many hops it may still make, the one that it is on included.
    pub hops: u8,
    pub topic: u8,
    /// How long the sender waits, from when it sent it.
    pub deadline_ms: u32,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    UnknownTopic,
    Failed(String),
    NotMine,
    Late,
    TooLarge(u64),
    /// A member between, named here, knows no way on.
    NoWay(NodeId, NoWay),
    /// A member between carries too much already.
    Busy(NodeId),
    /// The connection behind a member between ended before the answer.
    Lost(NodeId, String),
}

impl Fault {
    /// Whether it is the word of a member between, who may say so unsigned.
    fn is_of_the_way(&self) -> bool {
        matches!(self, Self::NoWay(..) | Self::Busy(_) | Self::Lost(..) | Self::Late | Self::NotMine)
    }
}

/// Writes a letter; `signer` signs it for the way over others.
pub fn seal(head: &Head, body: &[u8], signer: Option<&Identity>) -> Result<Vec<u8>, WireError> {
    let writer = Writer::new().section(HEAD, head)?.raw(BODY, body)?;
    match signer {
        Some(identity) => Ok(writer.raw(SIGNATURE, &identity.sign(&signed_letter(head, body)?))?.finish()),
        None => Ok(writer.finish()),
    }
}

/// A letter that came.
pub struct Opened<'a> {
    pub head: Head,
    pub body: &'a [u8],
    signature: Option<&'a [u8]>,
}

impl<'a> Opened<'a> {
    pub fn read(frame: &'a [u8]) -> Result<Self, WireError> {
        let reader = Reader::new(frame)?;
        let body = reader.raw(BODY).ok_or(WireError::Missing(BODY))?;
        Ok(Self { head: reader.section(HEAD)?, body, signature: reader.raw(SIGNATURE) })
    }

    /// Whether it is signed by who it says has written it.
    pub fn is_signed(&self) -> bool {
        let signed = signed_letter(&self.head, self.body).ok();
        signed.zip(self.signature).is_some_and(|(signed, by)| identity::verify(&self.head.from, &signed, by))
    }

    /// The same letter with so many hops left.
    pub fn onward(&self, hops: u8) -> Result<Vec<u8>, WireError> {
        let writer =
            Writer::new().section(HEAD, &Head { hops, ..self.head.clone() })?.raw(BODY, self.body)?;
        match self.signature {
            Some(signature) => Ok(writer.raw(SIGNATURE, signature)?.finish()),
            None => Ok(writer.finish()),
        }
    }
}

fn signed_letter(head: &Head, body: &[u8]) -> Result<Vec<u8>, WireError> {
    // Members between count the hops down.
    let head = Writer::new().section(HEAD, &Head { hops: 0, ..head.clone() })?.finish();
    Ok([LETTER, &head, body].concat())
}

/// Writes an answer; `signer` signs it for the way back over others, as the answer to that letter.
pub fn seal_answer(
    answer: Result<Vec<u8>, Fault>,
    signer: Option<(&Identity, u128)>,
) -> Result<Vec<u8>, WireError> {
    let writer = match &answer {
        Ok(body) => Writer::new().raw(BODY, body)?,
        Err(fault) => Writer::new().section(HEAD, fault)?,
    };
    let bytes = writer.finish();
    match signer {
        Some((identity, id)) => {
            // As a document around the document, so that what is signed is what travels.
            let signature = identity.sign(&signed_answer(id, &bytes));
            Ok(Writer::new().raw(BODY, &bytes)?.raw(SIGNATURE, &signature)?.finish())
        }
        None => Ok(bytes),
    }
}

/// Reads an answer; `over` names who must have signed it, and the letter, where it came over others.
pub fn open_answer(frame: &[u8], over: Option<(&NodeId, u128)>) -> Result<Result<Vec<u8>, Fault>, String> {
    let read = |frame: &[u8]| -> Result<Result<Vec<u8>, Fault>, WireError> {
        let reader = Reader::new(frame)?;
        match reader.raw(BODY) {
            Some(body) => Ok(Ok(body.to_vec())),
            None => Ok(Err(reader.section(HEAD)?)),
        }
    };
    let Some((node, id)) = over else { return read(frame).map_err(|error| error.to_string()) };
    let reader = Reader::new(frame).map_err(|error| error.to_string())?;
    match (reader.raw(BODY), reader.raw(SIGNATURE)) {
        (Some(inner), Some(by)) if identity::verify(node, &signed_answer(id, inner), by) => {
            read(inner).map_err(|error| error.to_string())
        }
        (None, None) => match read(frame).map_err(|error| error.to_string())? {
            Err(fault) if fault.is_of_the_way() => Ok(Err(fault)),
            _ => Err("the answer is not signed".into()),
        },
        _ => Err("the answer is not signed by who was asked".into()),
    }
}

fn signed_answer(id: u128, bytes: &[u8]) -> Vec<u8> {
    [ANSWER, &id.to_le_bytes(), bytes].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(from: &Identity, to: &Identity) -> Head {
        Head { id: 7, from: from.id().clone(), to: to.id().clone(), hops: 5, topic: 1, deadline_ms: 9 }
    }

    #[test]
    fn a_signed_letter_may_lose_hops_and_nothing_else_may_change() {
        let (from, to, other) = (Identity::generate(), Identity::generate(), Identity::generate());
        let frame = seal(&head(&from, &to), b"body", Some(&from)).unwrap();
        let onward = Opened::read(&frame).unwrap().onward(4).unwrap();
        let opened = Opened::read(&onward).unwrap();
        assert!(opened.is_signed() && opened.head.hops == 4 && opened.body == b"body");
        let forged = seal(&head(&from, &to), b"body", Some(&other)).unwrap();
        assert!(!Opened::read(&forged).unwrap().is_signed());
        assert!(!Opened::read(&seal(&head(&from, &to), b"body", None).unwrap()).unwrap().is_signed());
        for at in 0..frame.len() {
            let mut bent = frame.clone();
            bent[at] ^= 1;
            let changed = |opened: &Opened<'_>| opened.is_signed() && opened.head.hops == 5;
            assert!(!Opened::read(&bent).is_ok_and(|opened| changed(&opened)), "byte {at}");
        }
    }

    #[test]
    fn an_answer_over_others_is_that_of_who_was_asked_to_this_letter() {
        let (asked, between) = (Identity::generate(), Identity::generate());
        let over = |id| Some((asked.id(), id));
        let answer = seal_answer(Ok(b"yes".to_vec()), Some((&asked, 7))).unwrap();
        assert_eq!(open_answer(&answer, over(7)), Ok(Ok(b"yes".to_vec())));
        assert!(open_answer(&answer, over(8)).is_err(), "the answer to another letter");
        let forged = seal_answer(Ok(b"no".to_vec()), Some((&between, 7))).unwrap();
        assert!(open_answer(&forged, over(7)).is_err());
        let unsigned = seal_answer(Ok(b"no".to_vec()), None).unwrap();
        assert!(open_answer(&unsigned, over(7)).is_err());
        assert_eq!(open_answer(&unsigned, None), Ok(Ok(b"no".to_vec())));
        let failed = seal_answer(Err(Fault::Failed("no".into())), None).unwrap();
        assert!(open_answer(&failed, over(7)).is_err(), "what the asked one says is signed");
        let lost = Fault::NoWay(between.id().clone(), NoWay::NoRoute);
        let word = seal_answer(Err(lost.clone()), None).unwrap();
        assert_eq!(open_answer(&word, over(7)), Ok(Err(lost)), "what a member between says need not be");
    }
}
