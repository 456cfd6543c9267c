//! SHA-256, the reference's digest.
//!
//! One tensor is one stream: the algorithm leaves nothing to split. What can be won is that the compression function
//! never waits for memory. Where the processor's own prefetching does not hide it, hashing 256 MiB runs at 0.63 of the
//! speed in cache; asking for the lines two KiB ahead costs nothing where it does (0.99 of the speed in cache, as without),
//! and wins back 0.1 to 0.3 of the speed where it does not (seen with 1 KiB granules in random order: from 0.49 to 0.65 of
//! the speed in cache, while reading ahead with plain loads, which the processor has to wait for, comes to 0.56).

use sha2::{Digest as _, Sha256};

use crate::collective::c10d;

/// Bytes between hints, and how far they go ahead: enough for the latency of memory at 2 GB/s, little enough to
/// stay in the first-level cache.
const STEP: usize = 1 << 10;
const AHEAD: usize = 2 << 10;
/// What the compression function takes at a time.
const BLOCK: usize = 64;

pub(super) fn hash(head: &str, bytes: &[u8]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(head.as_bytes());
    // Fills up the block that the head began, so that all the others are compressed where they lie.
    let begun = head.len() % BLOCK;
    let (filling, rest) = bytes.split_at(bytes.len().min((BLOCK - begun) % BLOCK));
    hasher.update(filling);
    c10d::prefetch(&rest[..rest.len().min(AHEAD)]);
    for (index, step) in rest.chunks(STEP).enumerate() {
        let ahead = &rest[rest.len().min(index * STEP + AHEAD)..];
        c10d::prefetch(&ahead[..ahead.len().min(STEP)]);
        hasher.update(step);
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::{AHEAD, BLOCK, STEP, hash};

    #[test]
    fn hints_and_steps_change_nothing() {
        let bytes: Vec<u8> = (0..3 * AHEAD + 7).map(|index| u8::try_from(index * 7 % 251).unwrap()).collect();
        let edges = [0, 1, 3, 4, 5, BLOCK, STEP, AHEAD, STEP + AHEAD, 2 * AHEAD, 3 * AHEAD, 1009, 4099];
        for length in edges.into_iter().flat_map(|edge: usize| [edge.saturating_sub(1), edge, edge + 1]) {
            for head in ["", "a", &"h".repeat(BLOCK - 1), &"h".repeat(BLOCK), &"h".repeat(BLOCK + 1)] {
                let plain = Sha256::new_with_prefix(head).chain_update(&bytes[..length]).finalize();
                assert_eq!(hash(head, &bytes[..length]), <[u8; 32]>::from(plain), "{} + {length}", head.len());
            }
        }
    }
}
