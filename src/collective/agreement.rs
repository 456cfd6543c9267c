//! The agreement: one exchange that is at once the barrier, the desynchronization check, the schema check, the used mask
//! and the replica check.
//!
//! Bitwise OR is idempotent, so the dissemination pattern of a barrier computes an OR over all ranks exactly, for any
//! number of ranks: in round `k` a rank sends what it has to `rank + 2^k` and receives from `rank - 2^k`, both modulo
//! the world size. After `ceil(log2 W)` rounds everybody holds the OR of all.
//!
//! A value that must be the same everywhere travels as `(b, !b)`: the OR of all `b` and the OR of all `!b` share a bit
//! exactly where two ranks differ. Every rank holds the same result, so every rank sees the same disagreement.

#![forbid(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::c10d::{self, Group};
use super::deadline::Deadline;
use crate::error::{EngineError, Operation};
use crate::fault::{Faults, Point};

/// Changes with every change of the frame's meaning. The frame's length, and where this number stands, never change, so
/// that builds with different protocols can still tell.
pub(crate) const PROTOCOL: u32 = 1;
const MAGIC: u32 = u32::from_be_bytes(*b"SFTS");

/// Bytes of a frame.
pub(crate) const FRAME: usize = 512;
const EQUAL: usize = 128;
const FLAGS: usize = 2 * EQUAL;
const MASK: usize = FLAGS + 8;
/// Bits of the used mask that fit into a frame; a longer mask travels in a second exchange.
pub(crate) const MASK_BITS: usize = (FRAME - MASK) * 8;

/// Set by a rank that cannot go on: nobody does.
pub(crate) const REFUSED: u64 = 1;
/// Set by a rank whose answer to a yes-or-no question is no.
pub(crate) const NO: u64 = 2;

/// A field that must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Protocol,
    Operation,
    Call,
    Exchange,
    Step,
    Phase,
    Bucket,
    Schema,
    Options,
    Root,
    Content,
}

impl Field {
    const ALL: [(Self, std::ops::Range<usize>); 11] = [
        (Self::Protocol, 0..8),
        (Self::Operation, 8..16),
        (Self::Call, 16..24),
        (Self::Exchange, 24..32),
        (Self::Step, 32..40),
        (Self::Phase, 40..48),
        (Self::Bucket, 48..56),
        (Self::Schema, 56..72),
        (Self::Options, 72..88),
        (Self::Root, 88..120),
        (Self::Content, 120..128),
    ];

    fn range(self) -> std::ops::Range<usize> {
        let (_, range) = &Self::ALL[self as usize];
        range.clone()
    }
}

/// What a rank brings to an agreement.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    bytes: [u8; FRAME],
}

impl Frame {
    pub(crate) fn new(operation: Operation, call: u64) -> Self {
        let mut frame = Self { bytes: [0; FRAME] };
        frame.put(Field::Protocol, &((u64::from(PROTOCOL) << 32) | u64::from(MAGIC)).to_le_bytes());
        frame.put(Field::Operation, &(operation as u64).to_le_bytes());
        frame.put(Field::Call, &call.to_le_bytes());
        frame
    }

    fn put(&mut self, field: Field, value: &[u8]) {
        self.bytes[field.range()].copy_from_slice(value);
    }

    fn number(mut self, field: Field, value: u64) -> Self {
        self.put(field, &value.to_le_bytes());
        self
    }

    /// No step is not step 0: the operation that takes none differs from the one that does.
    pub(crate) fn step(self, step: Option<u64>) -> Self {
        self.number(Field::Step, step.unwrap_or(0))
    }

    pub(crate) fn phase(self, hash: u64) -> Self {
        self.number(Field::Phase, hash)
    }

    /// The bucket about to move, counted from 1; 0 before the first.
    pub(crate) fn bucket(self, number: u64) -> Self {
        self.number(Field::Bucket, number)
    }

    pub(crate) fn schema(mut self, digest: &[u8; 16]) -> Self {
        self.put(Field::Schema, digest);
        self
    }

    pub(crate) fn options(mut self, digest: &[u8; 16]) -> Self {
        self.put(Field::Options, digest);
        self
    }

    pub(crate) fn root(mut self, digest: &[u8; 32]) -> Self {
        self.put(Field::Root, digest);
        self
    }

    /// Whatever else must be equal for this operation: the length of the mask, the type of a sum.
    pub(crate) fn content(self, value: u64) -> Self {
        self.number(Field::Content, value)
    }

    pub(crate) fn flag(mut self, flag: u64, set: bool) -> Self {
        if set {
            self.bytes[FLAGS] |= u8::try_from(flag).unwrap_or(u8::MAX);
        }
        self
    }

    /// Takes as many bits as fit.
    pub(crate) fn mask(mut self, mask: &Mask) -> Self {
        let bytes = &mask.bytes[..mask.bytes.len().min(FRAME - MASK)];
        self.bytes[MASK..MASK + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// The bytes on the wire, of the `exchange`-th exchange of the group.
    fn encode(mut self, exchange: u64) -> [u8; FRAME] {
        self.put(Field::Exchange, &exchange.to_le_bytes());
        let (equal, rest) = self.bytes.split_at_mut(EQUAL);
        for (complement, value) in rest.iter_mut().zip(equal) {
            *complement = !*value;
        }
        self.bytes
    }
}

/// The OR of all ranks' frames: the same on every rank.
#[derive(Clone, Debug)]
pub(crate) struct Merged {
    bytes: [u8; FRAME],
}

impl Merged {
    /// Whether all ranks brought the same value.
    pub(crate) fn agrees(&self, field: Field) -> bool {
        field.range().all(|index| self.bytes[index] & self.bytes[EQUAL + index] == 0)
    }

    /// Whether all ranks brought the same in every field but this one.
    pub(crate) fn unanimous_but_for(&self, except: Field) -> bool {
        Field::ALL.iter().all(|(field, _)| *field == except || self.agrees(*field))
    }

    /// Whether any rank has set the flag.
    pub(crate) fn any(&self, flag: u64) -> bool {
        u64::from(self.bytes[FLAGS]) & flag != 0
    }

    /// The start of the union of all masks.
    pub(crate) fn mask_bytes(&self) -> &[u8] {
        &self.bytes[MASK..]
    }
}

/// One bit a parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mask {
    bytes: Vec<u8>,
    len: usize,
}

impl Mask {
    pub(crate) fn new(bits: impl ExactSizeIterator<Item = bool>) -> Self {
        let len = bits.len();
        let mut bytes = vec![0; len.div_ceil(8)];
        for (index, bit) in bits.enumerate() {
            bytes[index / 8] |= u8::from(bit) << (index % 8);
        }
        Self { bytes, len }
    }

    pub(crate) fn get(&self, index: usize) -> bool {
        index < self.len && self.bytes[index / 8] >> (index % 8) & 1 == 1
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Whether the mask is longer than what a frame carries.
    pub(crate) fn needs_second_exchange(&self) -> bool {
        self.len > MASK_BITS
    }
}

/// `ceil(log2 world_size)`.
pub(crate) fn rounds(world_size: usize) -> u32 {
    world_size.next_power_of_two().trailing_zeros()
}

/// The ranks that `rank` sends to and receives from in a round.
pub(crate) fn peers(rank: usize, world_size: usize, round: u32) -> (usize, usize) {
    let distance = 1_usize << round;
    ((rank + distance) % world_size, (rank + world_size - distance) % world_size)
}

/// Exchanges over the control group. The n-th exchange of a rank pairs with the n-th of every other, whatever operation
/// each is in, because its tags come from this counter.
pub(crate) struct Exchanger {
    rank: usize,
    world_size: usize,
    count: u64,
    frames: Buffers,
    others: Buffers,
    faults: Faults,
}

/// Torch tensors to send from and to receive into: one of each a round, kept from exchange to exchange.
#[derive(Default)]
struct Buffers {
    length: usize,
    outgoing: Vec<Tensor>,
    incoming: Vec<Tensor>,
}

impl Buffers {
    fn fit(&mut self, length: usize, rounds: usize) -> Result<(), EngineError> {
        if self.length == length && self.outgoing.len() == rounds {
            return Ok(());
        }
        let tensors = || -> Result<Vec<Tensor>, EngineError> { (0..rounds).map(|_| tensor_of(length)).collect() };
        *self = Self { length, outgoing: tensors()?, incoming: tensors()? };
        Ok(())
    }
}

/// A CPU tensor of that many bytes.
pub(crate) fn tensor_of(length: usize) -> Result<Tensor, EngineError> {
    let length = i64::try_from(length).map_err(|_| EngineError::other("a message of over 2^63 bytes"))?;
    Ok(Tensor::f_zeros([length], (Kind::Uint8, Device::Cpu))?)
}

impl Exchanger {
    pub(crate) fn new(rank: usize, world_size: usize, faults: Faults) -> Self {
        Self { rank, world_size, count: 0, frames: Buffers::default(), others: Buffers::default(), faults }
    }

    /// Exchanges frames. Collective over the group.
    pub(crate) fn agree(
        &mut self,
        group: &mut Group,
        frame: Frame,
        deadline: &Deadline,
    ) -> Result<Merged, EngineError> {
        let mut bytes = frame.encode(self.count);
        self.or(group, &mut bytes, deadline)?;
        Ok(Merged { bytes })
    }

    /// Replaces `bytes` by the OR over all ranks. Collective; the length must have been agreed before.
    ///
    /// After an error works may still be in flight: the group has to be aborted and drained.
    pub(crate) fn or(&mut self, group: &mut Group, bytes: &mut [u8], deadline: &Deadline) -> Result<(), EngineError> {
        let rounds = rounds(self.world_size);
        let buffers = if bytes.len() == FRAME { &mut self.frames } else { &mut self.others };
        buffers.fit(bytes.len(), rounds as usize)?;
        let first_tag = self.count % (1 << 24) * 64;
        self.count += 1;

        let steps: Vec<(u32, u32, u32)> = (0..rounds)
            .map(|round| {
                let (to, from) = peers(self.rank, self.world_size, round);
                let tag = u32::try_from(first_tag).unwrap_or(0) + round;
                // World sizes fit into 32 bits: the builder has checked.
                (u32::try_from(to).unwrap_or(0), u32::try_from(from).unwrap_or(0), tag)
            })
            .collect();
        // All receives before the first send: then no send finds its receiver unprepared, and the exchange costs what a
        // barrier costs.
        let mut receives = Vec::with_capacity(steps.len());
        for (incoming, &(_, from, tag)) in buffers.incoming.iter().zip(&steps) {
            receives.push(group.receive(incoming, from, tag)?);
        }
        self.faults.reach(Point::ExchangePosted)?;
        let mut sends = Vec::with_capacity(steps.len());
        for ((round, receive), &(to, _, tag)) in receives.into_iter().enumerate().zip(&steps) {
            c10d::write_bytes(&mut buffers.outgoing[round], bytes)?;
            sends.push(group.send(&buffers.outgoing[round], to, tag)?);
            self.faults.reach(Point::ExchangeSent)?;
            group.wait(receive, deadline.remaining())?;
            for (mine, theirs) in bytes.iter_mut().zip(c10d::bytes(&buffers.incoming[round])?) {
                *mine |= theirs;
            }
        }
        for send in sends {
            group.wait(send, deadline.remaining())?;
        }
        self.faults.reach(Point::ExchangeDone)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // Ranks and lengths are small here.
mod tests {
    use proptest::prelude::*;

    use super::{Field, Frame, MASK_BITS, Mask, Merged, NO, REFUSED, peers, rounds};
    use crate::error::Operation;

    /// The schedule carried out on plain vectors.
    fn disseminate(mut held: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let world_size = held.len();
        for round in 0..rounds(world_size) {
            let sent = held.clone();
            for (rank, bytes) in held.iter_mut().enumerate() {
                let (_, from) = peers(rank, world_size, round);
                assert_eq!(peers(from, world_size, round).0, rank, "send and receive must pair");
                for (mine, theirs) in bytes.iter_mut().zip(&sent[from]) {
                    *mine |= theirs;
                }
            }
        }
        held
    }

    fn merge(frames: Vec<Frame>) -> Merged {
        let encoded = frames.into_iter().map(|frame| frame.encode(5).to_vec()).collect();
        let merged = disseminate(encoded);
        assert!(merged.iter().all(|bytes| bytes == &merged[0]), "every rank must read the same result");
        Merged { bytes: merged[0].clone().try_into().unwrap() }
    }

    fn frame() -> Frame {
        Frame::new(Operation::Sum, 3)
    }

    proptest! {
        #[test]
        fn dissemination_is_an_or(
            held in (1_usize..=17).prop_flat_map(|world| {
                proptest::collection::vec(proptest::collection::vec(any::<u8>(), 9), world)
            })
        ) {
            let expected = held.iter().fold(vec![0; 9], |mut all, bytes| {
                all.iter_mut().zip(bytes).for_each(|(all, byte)| *all |= byte);
                all
            });
            for result in disseminate(held) {
                prop_assert_eq!(&result, &expected);
            }
        }

        #[test]
        fn a_field_agrees_exactly_when_the_set_of_values_has_one_member(
            steps in (1_usize..=17).prop_flat_map(|world| proptest::collection::vec(0_u64..3, world)),
            roots in proptest::collection::vec(any::<bool>(), 17),
        ) {
            let frames = steps
                .iter()
                .zip(&roots)
                .map(|(step, root)| frame().step(Some(*step)).root(&[u8::from(*root); 32]))
                .collect();
            let merged = merge(frames);
            let one = |values: &[u64]| values.iter().collect::<std::collections::HashSet<_>>().len() == 1;
            let roots: Vec<u64> = roots[..steps.len()].iter().map(|root| u64::from(*root)).collect();
            prop_assert_eq!(merged.agrees(Field::Step), one(&steps));
            prop_assert_eq!(merged.agrees(Field::Root), one(&roots));
            prop_assert_eq!(merged.unanimous_but_for(Field::Root), one(&steps));
            prop_assert!(merged.agrees(Field::Operation) && merged.agrees(Field::Schema));
        }

        #[test]
        fn masks_unite(
            masks in proptest::collection::vec(proptest::collection::vec(any::<bool>(), MASK_BITS), 1..6)
        ) {
            let merged = merge(
                masks.iter().map(|bits| frame().mask(&Mask::new(bits.iter().copied()))).collect(),
            );
            let mut union = Mask::new(vec![false; MASK_BITS].into_iter());
            union.bytes_mut().copy_from_slice(merged.mask_bytes());
            for index in 0..MASK_BITS {
                prop_assert_eq!(union.get(index), masks.iter().any(|bits| bits[index]));
            }
        }
    }

    /// Over real connections, for every world size up to 17, with ranks that dawdle by turns: a rank may be a whole
    /// exchange ahead of another. Lengths change between exchanges.
    #[test]
    fn exchanges_over_gloo_are_an_or_whoever_is_late() {
        use std::time::Duration;

        use rand::rngs::StdRng;
        use rand::{Rng, SeedableRng};

        use super::{Exchanger, Faults};
        use crate::collective::c10d::{Group, NetworkDevice, Store};
        use crate::collective::deadline::Deadline;

        const MINUTE: Duration = Duration::from_secs(60);
        const EXCHANGES: u64 = 12;
        let length = |exchange: u64| [9, super::FRAME, 1, 4099][exchange as usize % 4];
        // Few bits each, so that the OR is not all ones.
        let bytes = |rank: usize, exchange: u64| -> Vec<u8> {
            let mut random = StdRng::seed_from_u64(exchange * 100 + rank as u64);
            (0..length(exchange)).map(|_| 1_u8.checked_shl(random.random_range(0..60)).unwrap_or(0)).collect()
        };
        for world in 1..=17 {
            let store = Store::hash().unwrap();
            std::thread::scope(|scope| {
                for rank in 0..world {
                    let store = &store;
                    scope.spawn(move || {
                        let device = NetworkDevice { interface: None, hostname: Some("127.0.0.1") };
                        let mut group = Group::gloo(store, rank as u32, world as u32, MINUTE, device).unwrap();
                        let mut exchanger = Exchanger::new(rank, world, Faults::default());
                        let mut random = StdRng::seed_from_u64(rank as u64);
                        for exchange in 0..EXCHANGES {
                            if random.random_bool(0.2) {
                                std::thread::sleep(Duration::from_micros(random.random_range(0..3000)));
                            }
                            let mut held = bytes(rank, exchange);
                            exchanger.or(&mut group, &mut held, &Deadline::after(MINUTE)).unwrap();
                            let expected = (0..world).fold(vec![0; held.len()], |mut all, rank| {
                                all.iter_mut().zip(bytes(rank, exchange)).for_each(|(all, byte)| *all |= byte);
                                all
                            });
                            assert_eq!(held, expected, "exchange {exchange} of {world} ranks");
                        }
                        assert_eq!(group.outstanding(), 0);
                    });
                }
            });
        }
    }

    #[test]
    fn flags_are_seen_by_all_and_kept_apart() {
        let merged = merge(vec![frame(), frame().flag(NO, true), frame().flag(REFUSED, false)]);
        assert!(merged.any(NO) && !merged.any(REFUSED) && merged.unanimous_but_for(Field::Root));
    }

    #[test]
    fn fields_do_not_overlap_and_cover_the_equal_part() {
        let mut next = 0;
        for (index, (field, range)) in Field::ALL.iter().enumerate() {
            assert_eq!(*field as usize, index);
            assert_eq!(range.start, next);
            next = range.end;
        }
        assert_eq!(next, super::EQUAL);
    }

    #[test]
    fn every_field_is_told_apart() {
        let differing: [(Frame, Field); 8] = [
            (Frame::new(Operation::AllAgree, 3), Field::Operation),
            (Frame::new(Operation::Sum, 4), Field::Call),
            (frame().step(Some(1)), Field::Step),
            (frame().phase(1), Field::Phase),
            (frame().bucket(1), Field::Bucket),
            (frame().schema(&[1; 16]), Field::Schema),
            (frame().options(&[1; 16]), Field::Options),
            (frame().content(1), Field::Content),
        ];
        for (other, field) in differing {
            let merged = merge(vec![frame(), other]);
            assert!(!merged.agrees(field) && merged.unanimous_but_for(field), "{field:?}");
        }
    }

    #[test]
    fn world_sizes_have_the_rounds_of_a_barrier() {
        let expected = [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (64, 6), (65, 7)];
        for (world_size, count) in expected {
            assert_eq!(rounds(world_size), count, "{world_size} ranks");
        }
    }
}
