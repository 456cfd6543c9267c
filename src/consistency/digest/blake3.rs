//! BLAKE3 over the same text and bytes as SHA-256. A tree: one huge tensor occupies every thread of the pool.

use ::blake3::Hasher;

/// Below this many bytes, splitting costs more than it wins (the `blake3` crate's figure).
const SPLIT: usize = 128 << 10;
/// The widest group of chunks that is hashed at once, 16 with AVX-512.
const GROUP: usize = 16 << 10;

/// Splits over the pool that it is called in.
pub(super) fn hash(head: &str, bytes: &[u8]) -> [u8; 32] {
    let mut hasher = Hasher::new();
    // Text and bytes fill the first group together, in cache. With the text alone in front, chunks would be hashed one,
    // two, four at a time until they were a whole group: most of the time of a small tensor.
    let (first, rest) = bytes.split_at(bytes.len().min(GROUP.saturating_sub(head.len())));
    let mut group = Vec::with_capacity(head.len() + first.len());
    group.extend_from_slice(head.as_bytes());
    group.extend_from_slice(first);
    hasher.update(&group);
    if rest.len() < SPLIT || rayon::current_num_threads() == 1 {
        hasher.update(rest);
    } else {
        hasher.update_rayon(rest);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::{GROUP, SPLIT, hash};

    #[test]
    fn it_is_the_official_hash_of_text_and_bytes() {
        let bytes: Vec<u8> = (0..=5 * SPLIT).map(|index| u8::try_from(index * 11 % 251).unwrap()).collect();
        let edges = [0, 1, 64, 1024, 2048, 1009, GROUP, SPLIT, GROUP + SPLIT, 2 * SPLIT, 3 * SPLIT, 5 * SPLIT];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for length in edges.into_iter().flat_map(|edge: usize| [edge.saturating_sub(1), edge, edge + 1]) {
            for head in ["", "(torch.Size([]), torch.bool)", &"h".repeat(1025), &"h".repeat(GROUP + 1)] {
                let mut text = head.as_bytes().to_vec();
                text.extend_from_slice(&bytes[..length]);
                let plain = *::blake3::hash(&text).as_bytes();
                assert_eq!(hash(head, &bytes[..length]), plain, "{} + {length}", head.len());
                assert_eq!(pool.install(|| hash(head, &bytes[..length])), plain, "{} + {length}, split", head.len());
            }
        }
    }
}
