//! BLAKE3 over the same text and bytes as SHA-256. A tree: one huge tensor occupies every thread of the pool.

use ::blake3::Hasher;

/// Below this many bytes, splitting costs more than it wins (the `blake3` crate's figure).
const SPLIT: usize = 128 << 10;

/// Splits over the pool that it is called in.
pub(super) fn hash(head: &str, bytes: &[u8]) -> [u8; 32] {
    let mut hasher = Hasher::new();
    hasher.update(head.as_bytes());
    if bytes.len() < SPLIT || rayon::current_num_threads() == 1 {
        hasher.update(bytes);
    } else {
        hasher.update_rayon(bytes);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::{SPLIT, hash};

    #[test]
    fn it_is_the_official_hash_of_text_and_bytes() {
        let bytes: Vec<u8> = (0..5 * SPLIT + 1).map(|index| u8::try_from(index * 11 % 251).unwrap()).collect();
        let edges = [0, 1, 64, 1024, 2048, 1009, SPLIT, 2 * SPLIT, 3 * SPLIT, 5 * SPLIT];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for length in edges.into_iter().flat_map(|edge: usize| [edge.saturating_sub(1), edge, edge + 1]) {
            for head in ["", "(torch.Size([]), torch.bool)", &"h".repeat(1025)] {
                let mut text = head.as_bytes().to_vec();
                text.extend_from_slice(&bytes[..length]);
                let plain = *::blake3::hash(&text).as_bytes();
                assert_eq!(hash(head, &bytes[..length]), plain, "{} + {length}", head.len());
                assert_eq!(pool.install(|| hash(head, &bytes[..length])), plain, "{} + {length}, split", head.len());
            }
        }
    }
}
