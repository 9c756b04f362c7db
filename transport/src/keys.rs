//! Keys of a channel: from two ephemeral X25519 keys to one AEAD key per direction and incarnation.
//!
//! ```text
//! shared  = X25519(own private, their public)
//! prk     = HKDF-Extract(SHA-256, salt = channel id, shared)
//! key     = HKDF-Expand(prk, "shoal/0 " label, public of the offer, public of the answer, direction, incarnation)
//! ```
//! The public keys travel signed by the node identities, so who holds `prk` is who was meant. Labels: `hello` (MAC of
//! the opening, plain carriers too), `frame` (AEAD), `number` (the short channel number of frame headers).
//!
//! RFC 7748, RFC 5869, RFC 8439, NIST SP 800-38D. The nonce of a frame is the count of frames sealed before it with the
//! same key, acknowledgements and replays included; a key is never used for a second connection since each connection
//! has its own incarnation.

use ring::{aead, agreement, hkdf, hmac, rand};

use crate::frame::HEADER_BYTES;

/// Bytes of an AEAD tag.
pub(crate) const TAG_BYTES: usize = 16;
/// Bytes of an X25519 public key.
pub(crate) const PUBLIC_BYTES: usize = 32;
/// Bytes of the MAC of a hello or its answer.
pub(crate) const MAC_BYTES: usize = 32;

/// Why there are no keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeyError {
    #[error("the system gives no random bytes")]
    Random,
    #[error("the other side's public key is not usable")]
    Public,
    #[error("a key could not be derived")]
    Derive,
}

/// How frames are protected on a carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Plain bytes with a checksum: loopback and other direct connections only.
    Plain,
    /// AES-256-GCM.
    Aes256Gcm,
    /// ChaCha20-Poly1305, where one side has no AES instructions.
    ChaCha20Poly1305,
}

/// Whether this processor has the instructions that make AES-GCM the faster cipher.
pub(crate) fn has_aes() -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
    return is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
    return false;
}

/// Who sends: the side that made the offer and dials, or the side that accepted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    FromDialer,
    FromAcceptor,
}

/// This side's half of a key agreement, used once.
pub(crate) struct Half {
    private: agreement::EphemeralPrivateKey,
    public: [u8; PUBLIC_BYTES],
}

impl Half {
    pub(crate) fn new() -> Result<Half, KeyError> {
        let private =
            agreement::EphemeralPrivateKey::generate(&agreement::X25519, &rand::SystemRandom::new())
                .map_err(|_| KeyError::Random)?;
        let public = private.compute_public_key().map_err(|_| KeyError::Random)?;
        let public = public.as_ref().try_into().map_err(|_| KeyError::Derive)?;
        Ok(Half { private, public })
    }

    pub(crate) fn public(&self) -> [u8; PUBLIC_BYTES] {
        self.public
    }

    /// The keys of the dialing side, once the answer is there.
    pub(crate) fn dialer(
        self,
        channel: &[u8; 16],
        answer: [u8; PUBLIC_BYTES],
    ) -> Result<ChannelKeys, KeyError> {
        let offer = self.public;
        self.agree(channel, answer, offer, answer)
    }

    /// The keys of the accepting side.
    pub(crate) fn acceptor(
        self,
        channel: &[u8; 16],
        offer: [u8; PUBLIC_BYTES],
    ) -> Result<ChannelKeys, KeyError> {
        let answer = self.public;
        self.agree(channel, offer, offer, answer)
    }

    fn agree(
        self,
        channel: &[u8; 16],
        theirs: [u8; PUBLIC_BYTES],
        offer: [u8; PUBLIC_BYTES],
        answer: [u8; PUBLIC_BYTES],
    ) -> Result<ChannelKeys, KeyError> {
        let theirs = agreement::UnparsedPublicKey::new(&agreement::X25519, theirs);
        let prk = agreement::agree_ephemeral(self.private, &theirs, |shared| {
            hkdf::Salt::new(hkdf::HKDF_SHA256, channel).extract(shared)
        })
        .map_err(|_| KeyError::Public)?;
        Ok(ChannelKeys { prk, offer, answer })
    }
}

/// What both sides of a channel derive their keys from; lives as long as the channel.
#[derive(Clone)]
pub(crate) struct ChannelKeys {
    prk: hkdf::Prk,
    offer: [u8; PUBLIC_BYTES],
    answer: [u8; PUBLIC_BYTES],
}

impl ChannelKeys {
    /// Of two neighbours with a cable, from what each drew by chance and told the other on their anchor.
    pub(crate) fn of_cable(offer: [u8; PUBLIC_BYTES], answer: [u8; PUBLIC_BYTES]) -> ChannelKeys {
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, b"shoal cable").extract(&[offer, answer].concat());
        // Neither is to be told by what is derived.
        ChannelKeys { prk, offer: [0; PUBLIC_BYTES], answer: [0; PUBLIC_BYTES] }
    }

    fn expand<L: hkdf::KeyType, K>(
        &self,
        label: &[u8],
        direction: Direction,
        incarnation: u32,
        length: L,
        take: impl FnOnce(hkdf::Okm<'_, L>) -> Result<K, KeyError>,
    ) -> Result<K, KeyError> {
        let direction = match direction {
            Direction::FromDialer => [1],
            Direction::FromAcceptor => [2],
        };
        let incarnation = incarnation.to_be_bytes();
        let info: [&[u8]; 6] = [b"shoal/0 ", label, &self.offer, &self.answer, &direction, &incarnation];
        take(self.prk.expand(&info, length).map_err(|_| KeyError::Derive)?)
    }

    /// The number that stands for this channel in frame headers. Both sides derive the same; an outsider cannot guess it.
    /// None has 0, by which cables are tried.
    pub(crate) fn number(&self) -> Result<u16, KeyError> {
        self.expand(b"number", Direction::FromDialer, 0, Bytes(2), |okm| {
            let mut number = [0; 2];
            okm.fill(&mut number).map_err(|_| KeyError::Derive)?;
            Ok(u16::from_le_bytes(number).max(1))
        })
    }

    fn mac_key(&self, direction: Direction, incarnation: u32) -> Result<hmac::Key, KeyError> {
        self.expand(b"hello", direction, incarnation, hmac::HMAC_SHA256, |okm| Ok(okm.into()))
    }

    /// The MAC of an opening message over the concatenation of `parts`.
    pub(crate) fn mac(
        &self,
        direction: Direction,
        incarnation: u32,
        parts: &[&[u8]],
    ) -> Result<[u8; MAC_BYTES], KeyError> {
        let mut context = hmac::Context::with_key(&self.mac_key(direction, incarnation)?);
        for part in parts {
            context.update(part);
        }
        context.sign().as_ref().try_into().map_err(|_| KeyError::Derive)
    }

    /// Whether `mac` is the MAC of `message`, in constant time.
    pub(crate) fn mac_is(&self, direction: Direction, incarnation: u32, message: &[u8], mac: &[u8]) -> bool {
        self.mac_key(direction, incarnation).is_ok_and(|key| hmac::verify(&key, message, mac).is_ok())
    }

    /// The key for frames in one direction of one connection; `None` on a plain carrier.
    pub(crate) fn frames(
        &self,
        direction: Direction,
        incarnation: u32,
        protection: Protection,
    ) -> Result<Option<FrameKey>, KeyError> {
        let algorithm = match protection {
            Protection::Plain => return Ok(None),
            Protection::Aes256Gcm => &aead::AES_256_GCM,
            Protection::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        };
        let key = self.expand(b"frame", direction, incarnation, algorithm, |okm| {
            Ok(aead::LessSafeKey::new(aead::UnboundKey::from(okm)))
        })?;
        Ok(Some(FrameKey { key, frames: 0 }))
    }
}

/// A length for HKDF outputs that are no key of `ring`.
struct Bytes(usize);

impl hkdf::KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// Seals, or opens, the frames of one direction of one connection, in order.
pub(crate) struct FrameKey {
    key: aead::LessSafeKey,
    /// Frames sealed, or opened, so far: the next nonce.
    frames: u64,
}

impl FrameKey {
    /// `None` when this key has sealed 2^64 - 1 frames.
    fn nonce(&mut self) -> Option<aead::Nonce> {
        let mut nonce = [0; aead::NONCE_LEN];
        nonce[4..].copy_from_slice(&self.frames.to_be_bytes());
        self.frames = self.frames.checked_add(1)?;
        Some(aead::Nonce::assume_unique_for_key(nonce))
    }

    /// Encrypts `payload` in place.
    pub(crate) fn seal(
        &mut self,
        header: &[u8; HEADER_BYTES],
        payload: &mut [u8],
    ) -> Option<[u8; TAG_BYTES]> {
        let nonce = self.nonce()?;
        let tag = self.key.seal_in_place_separate_tag(nonce, aead::Aad::from(header), payload).ok()?;
        tag.as_ref().try_into().ok()
    }

    /// Decrypts `sealed` (payload, then tag) in place. False when it was not sealed by the other side as the next frame.
    pub(crate) fn open(&mut self, header: &[u8; HEADER_BYTES], sealed: &mut [u8]) -> bool {
        let Some(nonce) = self.nonce() else { return false };
        self.key.open_in_place(nonce, aead::Aad::from(header), sealed).is_ok()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The two sides' keys of one channel.
    pub(crate) fn pair(channel: [u8; 16]) -> (ChannelKeys, ChannelKeys) {
        let (dialer, acceptor) = (Half::new().unwrap(), Half::new().unwrap());
        let (offer, answer) = (dialer.public(), acceptor.public());
        (dialer.dialer(&channel, answer).unwrap(), acceptor.acceptor(&channel, offer).unwrap())
    }

    #[test]
    fn both_sides_derive_the_same_and_nothing_else_does() {
        let (dialer, acceptor) = pair([1; 16]);
        assert_eq!(dialer.number(), acceptor.number());
        let mac = dialer.mac(Direction::FromDialer, 3, &[b"ab", b"c"]).unwrap();
        assert!(acceptor.mac_is(Direction::FromDialer, 3, b"abc", &mac));
        assert!(!acceptor.mac_is(Direction::FromAcceptor, 3, b"abc", &mac));
        assert!(!acceptor.mac_is(Direction::FromDialer, 4, b"abc", &mac));
        assert!(!acceptor.mac_is(Direction::FromDialer, 3, b"abd", &mac));
        assert!(!pair([1; 16]).1.mac_is(Direction::FromDialer, 3, b"abc", &mac));
    }

    #[test]
    fn a_public_key_of_low_order_is_refused() {
        let half = Half::new().unwrap();
        assert_eq!(half.dialer(&[0; 16], [0; 32]).err(), Some(KeyError::Public));
    }

    #[test]
    fn frames_open_once_in_order_with_their_header_and_incarnation() {
        for protection in [Protection::Aes256Gcm, Protection::ChaCha20Poly1305] {
            let (dialer, acceptor) = pair([2; 16]);
            let mut seal = dialer.frames(Direction::FromDialer, 1, protection).unwrap().unwrap();
            let open = |incarnation| {
                acceptor.frames(Direction::FromDialer, incarnation, protection).unwrap().unwrap()
            };
            let sealed = |seal: &mut FrameKey, header: &[u8; HEADER_BYTES]| {
                let mut bytes = b"activations".to_vec();
                let tag = seal.seal(header, &mut bytes).unwrap();
                bytes.extend_from_slice(&tag);
                bytes
            };
            let (first, second) = (sealed(&mut seal, &[1; 32]), sealed(&mut seal, &[2; 32]));
            let mut reader = open(1);
            let mut copy = first.clone();
            assert!(reader.open(&[1; 32], &mut copy));
            assert_eq!(&copy[..11], b"activations");
            assert!(!open(1).open(&[1; 32], &mut second.clone()), "out of order");
            assert!(!open(1).open(&[9; 32], &mut first.clone()), "other header");
            assert!(!open(2).open(&[1; 32], &mut first.clone()), "other incarnation");
            assert!(reader.open(&[2; 32], &mut second.clone()));
        }
    }
}
