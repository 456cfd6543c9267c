//! The keyed fingerprint: a universal hash over the exact bits in two levels, with a fresh key for every check.
//!
//! # What is computed
//!
//! The bytes in logical order, padded with zeros, are cut into blocks of [`BLOCK`] bytes and each block into signed
//! little-endian 32-bit words `m[0], m[1], ...`. With 64-bit multipliers `k[0], k[1], ...`, one more than a block has words,
//! the **first level** gives two sums for each block, modulo 2^64:
//!
//! ```text
//! s = k[0] m[0] + k[1] m[1] + ...        t = k[1] m[0] + k[2] m[1] + ...
//! ```
//!
//! The **second level** is keyed BLAKE3 over the shape and dtype, the length in bytes (so that the padding is no content)
//! and the sums of all blocks in order (so that a block's position matters).
//!
//! # The key
//!
//! At connect rank 0 draws 32 bytes from the operating system and gives them to the others. The key of a check is keyed
//! BLAKE3 of a fixed text and the number of the call, under that secret; its extended output is the key of the second level
//! and then the multipliers. It is computed on the CPU: no device's generator is asked, whose output may differ between devices.
//!
//! # What can be missed
//!
//! Take two contents of one shape and dtype that differ, chosen without knowledge of the key. Some block differs.
//! Let `d[i]` be the differences of its words: integers with `|d[i]| < 2^32`, not all zero. Let `i` be the last with
//! `d[i] != 0`, and `d[i] = 2^z u` with odd `u`; `|d[i]| < 2^32` makes `z <= 31`.
//!
//! 1. The first sums are equal only if `k[i] d[i] = c` modulo 2^64, where `c` depends on `k[0] ... k[i-1]` only. As `u` can be
//!    divided by, that has 2^z solutions `k[i]` if 2^z divides `c`, and none otherwise: probability at most
//!    2^31 / 2^64 = **2^-33**, reached by flipping the top bit of one word.
//! 2. The second sums are equal only if `k[i+1] d[i] = c'`, where `c'` depends on `k[1] ... k[i]`. `k[i+1]` occurs in
//!    neither `c'` nor the first equation, so whatever made the first sums equal, the second are with probability at
//!    most 2^-33 again: together at most **2^-66**. The second hash thus needs no second set of multipliers.
//! 3. If any sum differs, or the shape, dtype or length, the second level hashes different texts.
//!
//! So a check passes over ranks that differ with probability at most 2^-66, whatever differs and however much, on top of
//! what it takes to find a collision of BLAKE3 or to tell its output from random bits. The next check draws another key:
//! what is missed once is missed again with 2^-66 only. A plain sum or XOR has no such bound: swapped elements or two
//! flips cancel for certain.
//!
//! The bound is about accidents. A program that knows the key (any rank does) can make contents that collide.
//!
//! # Backends
//!
//! One contract, each tested against the definition in the tests below: [`hash`] for bytes in CPU memory, split over
//! threads; [`Stream`] for bytes that come in pieces; [`device::OnDevice`] in torch operations, where the tensor lies.

pub(super) mod device;

use ::blake3::Hasher;
use rayon::prelude::*;

/// Bytes of a block: its multipliers (twice as many bytes) stay in the first-level cache.
const BLOCK: usize = 8 << 10;
const WORDS: usize = BLOCK / 4;
/// Bytes of the sums of a block.
const SUMS: usize = 16;
/// Bytes that a thread sums at a time: whole blocks.
const SEGMENT: usize = 1 << 20;

/// What one check multiplies by.
pub(crate) struct Key {
    second_level: [u8; 32],
    /// `WORDS + 1`.
    multipliers: Vec<u64>,
}

impl Key {
    /// The key of the check that is call number `call` of the sessions that share the secret.
    pub(crate) fn derive(secret: &[u8; 32], call: u64) -> Self {
        let mut output =
            Hasher::new_keyed(secret).update(b"sft-sync fingerprint 1\n").update(&call.to_le_bytes()).finalize_xof();
        let mut second_level = [0; 32];
        output.fill(&mut second_level);
        let mut multipliers = vec![0; WORDS + 1];
        for multiplier in &mut multipliers {
            let mut bytes = [0; 8];
            output.fill(&mut bytes);
            *multiplier = u64::from_le_bytes(bytes);
        }
        Self { second_level, multipliers }
    }

    /// The second level, with all but the sums.
    fn begin(&self, head: &str, nbytes: usize) -> Hasher {
        let mut hasher = Hasher::new_keyed(&self.second_level);
        hasher.update(&(head.len() as u64).to_le_bytes());
        hasher.update(head.as_bytes());
        hasher.update(&(nbytes as u64).to_le_bytes());
        hasher
    }

    /// The first level, of a block or of what there is of it.
    fn sums(&self, block: &[u8]) -> [u8; SUMS] {
        let (words, rest) = block.as_chunks::<4>();
        let mut sums = [0_u64; 2];
        // Two sums in one pass; the loop vectorizes.
        for (word, multipliers) in words.iter().zip(self.multipliers.windows(2)) {
            add(&mut sums, *word, multipliers);
        }
        if !rest.is_empty() {
            let mut word = [0; 4];
            word[..rest.len()].copy_from_slice(rest);
            add(&mut sums, word, &self.multipliers[words.len()..]);
        }
        let mut bytes = [0; SUMS];
        bytes[..8].copy_from_slice(&sums[0].to_le_bytes());
        bytes[8..].copy_from_slice(&sums[1].to_le_bytes());
        bytes
    }
}

#[inline]
fn add(sums: &mut [u64; 2], word: [u8; 4], multipliers: &[u64]) {
    // A signed word: libtorch has an int32, and no 32-bit unsigned type that all its devices compute with.
    let word = i64::from(i32::from_le_bytes(word)).cast_unsigned();
    sums[0] = sums[0].wrapping_add(multipliers[0].wrapping_mul(word));
    sums[1] = sums[1].wrapping_add(multipliers[1].wrapping_mul(word));
}

/// Of bytes in CPU memory; splits over the pool that it is called in.
pub(super) fn hash(key: &Key, head: &str, bytes: &[u8]) -> [u8; 32] {
    let mut hasher = key.begin(head, bytes.len());
    if bytes.len() <= SEGMENT || rayon::current_num_threads() == 1 {
        for block in bytes.chunks(BLOCK) {
            hasher.update(&key.sums(block));
        }
    } else {
        let segments: Vec<Vec<u8>> = bytes
            .par_chunks(SEGMENT)
            .map(|segment| segment.chunks(BLOCK).flat_map(|block| key.sums(block)).collect())
            .collect();
        for segment in segments {
            hasher.update(&segment);
        }
    }
    *hasher.finalize().as_bytes()
}

/// Of bytes that come one piece after another, of any lengths.
pub(super) struct Stream<'a> {
    key: &'a Key,
    hasher: Hasher,
    /// A block that is not full.
    begun: Vec<u8>,
}

impl<'a> Stream<'a> {
    pub(super) fn new(key: &'a Key, head: &str, nbytes: usize) -> Self {
        Self { key, hasher: key.begin(head, nbytes), begun: Vec::with_capacity(BLOCK) }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        if !self.begun.is_empty() {
            let (filling, rest) = bytes.split_at(bytes.len().min(BLOCK - self.begun.len()));
            self.begun.extend_from_slice(filling);
            bytes = rest;
            if self.begun.len() < BLOCK {
                return;
            }
            self.hasher.update(&self.key.sums(&self.begun));
            self.begun.clear();
        }
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        for block in blocks {
            self.hasher.update(&self.key.sums(block));
        }
        self.begun.extend_from_slice(rest);
    }

    pub(super) fn finish(mut self) -> [u8; 32] {
        if !self.begun.is_empty() {
            self.hasher.update(&self.key.sums(&self.begun));
        }
        *self.hasher.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests;
