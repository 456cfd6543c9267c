//! The backends against the definition, and what the bound promises.

use tch::{Device, Kind, Tensor};

use super::device::OnDevice;
use super::{BLOCK, Key, SEGMENT, Stream, WORDS, hash};

const HEAD: &str = "(torch.Size([3]), torch.float32)";

fn key(call: u64) -> Key {
    Key::derive(b"thirty-two bytes, kept by rank 0", call)
}

fn bytes(count: usize) -> Vec<u8> {
    // SplitMix64: no structure that a sum could hide behind.
    let mut state = 1_u64;
    (0..count)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed >> 56) as u8
        })
        .collect()
}

/// The definition, in big integers and word by word.
fn plain_sums(key: &Key, block: &[u8]) -> [u64; 2] {
    let mut padded = block.to_vec();
    padded.resize(BLOCK, 0);
    let sum = |shift: usize| {
        let total: i128 = (0..WORDS)
            .map(|index| {
                let word = i32::from_le_bytes(padded[4 * index..4 * index + 4].try_into().unwrap());
                i128::from(word) * i128::from(key.multipliers[index + shift])
            })
            .sum();
        u64::try_from(total.rem_euclid(1 << 64)).unwrap()
    };
    [sum(0), sum(1)]
}

fn plain(key: &Key, head: &str, bytes: &[u8]) -> [u8; 32] {
    let mut text = (head.len() as u64).to_le_bytes().to_vec();
    text.extend_from_slice(head.as_bytes());
    text.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    for block in bytes.chunks(BLOCK) {
        for sum in plain_sums(key, block) {
            text.extend_from_slice(&sum.to_le_bytes());
        }
    }
    *::blake3::keyed_hash(&key.second_level, &text).as_bytes()
}

/// The sums, as numbers.
fn sums(key: &Key, block: &[u8]) -> [u64; 2] {
    let bytes = key.sums(block);
    [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()))
}

fn tensor(bytes: &[u8]) -> Tensor {
    Tensor::from_slice(bytes)
}

/// In torch operations, on the CPU, staging two blocks at a time.
fn in_torch(key: &Key, head: &str, bytes: &[u8]) -> [u8; 32] {
    let mut device = OnDevice::with_staging(key, Device::Cpu, 2 * BLOCK).unwrap();
    device.hash(head, bytes.len(), &tensor(bytes), true).unwrap()
}

#[test]
fn backends_do_what_the_definition_says_at_every_boundary() {
    let key = key(1);
    let all = bytes(6 * BLOCK + 1);
    let edges = [0, 1, 2, 3, 4, 5, 7, 61, 1009, 7919, 12_289, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 6 * BLOCK];
    for length in edges.into_iter().flat_map(|edge: usize| [edge.saturating_sub(1), edge, edge + 1]) {
        let bytes = &all[..length];
        let expected = plain(&key, HEAD, bytes);
        assert_eq!(hash(&key, HEAD, bytes), expected, "{length}");
        assert_eq!(in_torch(&key, HEAD, bytes), expected, "{length}, in torch operations");
        for piece in [1, 3, 4, 1009, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK].into_iter().filter(|p| length / p < 9999) {
            let mut stream = Stream::new(&key, HEAD, length);
            bytes.chunks(piece).for_each(|piece| stream.update(piece));
            assert_eq!(stream.finish(), expected, "{length} in pieces of {piece}");
        }
    }
}

#[test]
fn threads_split_a_tensor_and_change_nothing() {
    let key = key(2);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let all = bytes(3 * SEGMENT + 1);
    for length in [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 3 * SEGMENT - 1, 3 * SEGMENT, 3 * SEGMENT + 1] {
        let expected = plain(&key, HEAD, &all[..length]);
        assert_eq!(pool.install(|| hash(&key, HEAD, &all[..length])), expected, "{length}");
    }
}

#[test]
fn extreme_words_wrap_the_same_everywhere() {
    let key = Key { second_level: [7; 32], multipliers: (0..=WORDS).map(|i| u64::MAX - (i % 3) as u64).collect() };
    for word in [i32::MIN, i32::MAX, -1, 0, 1] {
        let bytes = word.to_le_bytes().repeat(WORDS + 1);
        assert_eq!(hash(&key, HEAD, &bytes), plain(&key, HEAD, &bytes), "{word}");
        assert_eq!(in_torch(&key, HEAD, &bytes), plain(&key, HEAD, &bytes), "{word}");
    }
}

#[test]
fn in_torch_strides_lazy_bits_and_misaligned_storage_mean_nothing() {
    let key = key(3);
    let mut device = OnDevice::with_staging(&key, Device::Cpu, 2 * BLOCK).unwrap();
    let base = tensor(&bytes(4 * 61 * 47 + 1));
    let misaligned = base.slice(0, 1, None, 1);
    let mut views = vec![(misaligned.shallow_clone(), true)];
    let floats = tensor(&bytes(8 * 61 * 47)).view_dtype(Kind::ComplexFloat).view([61, 47]);
    views.extend([floats.tr(), floats.conj(), floats.conj().imag(), floats.tr().conj()].map(|view| (view, false)));
    for (view, contiguous) in views {
        let copy = view.resolve_conj().resolve_neg().contiguous();
        let flat = crate::collective::c10d::as_bytes(&copy).unwrap();
        let bytes = crate::collective::c10d::bytes(&flat).unwrap();
        assert_eq!(device.hash(HEAD, bytes.len(), &view, contiguous).unwrap(), plain(&key, HEAD, bytes), "{view:?}");
    }
}

#[test]
fn keys_depend_on_the_secret_and_the_call() {
    let other = Key::derive(b"thirty-two bytes, kept by rank 1", 1);
    let keys = [key(1), key(2), key(1 << 32), other];
    for (index, one) in keys.iter().enumerate() {
        assert_eq!(one.multipliers.len(), WORDS + 1);
        for two in &keys[..index] {
            assert!(one.multipliers.iter().zip(&two.multipliers).all(|(a, b)| a != b));
            assert_ne!(one.second_level, two.second_level);
            assert_ne!(hash(one, HEAD, &[]), hash(two, HEAD, &[]));
        }
    }
    assert_eq!(key(1).multipliers, key(1).multipliers);
}

/// End to end for each bit of one block; for the 127 other blocks of a MiB by what a flip adds to the sums, which the
/// first block shows to be what a flip does.
#[test]
fn every_flipped_bit_of_a_mebibyte_changes_the_sums_of_its_block() {
    let key = key(4);
    let mut all = bytes(1 << 20);
    for (number, block) in all.chunks_exact_mut(BLOCK).enumerate() {
        let before = sums(&key, block);
        for word in 0..WORDS {
            let held = i32::from_le_bytes(block[4 * word..4 * word + 4].try_into().unwrap());
            for bit in 0..32 {
                let flipped = held ^ 1_i32.rotate_left(bit);
                let added = (i64::from(flipped) - i64::from(held)).cast_unsigned();
                let after =
                    [0, 1].map(|shift| before[shift].wrapping_add(added.wrapping_mul(key.multipliers[word + shift])));
                assert_ne!(after, before, "block {number}, word {word}, bit {bit}");
                if number == 0 {
                    block[4 * word..4 * word + 4].copy_from_slice(&flipped.to_le_bytes());
                    assert_eq!(sums(&key, block), after, "word {word}, bit {bit}");
                    block[4 * word..4 * word + 4].copy_from_slice(&held.to_le_bytes());
                }
            }
        }
    }
    // From the sums to the digest, over all blocks.
    let before = hash(&key, HEAD, &all);
    for flip in 0..128 {
        let at = (flip * 8191 + 17) % all.len();
        all[at] ^= 1 << (flip % 8);
        assert_ne!(hash(&key, HEAD, &all), before, "byte {at}");
        all[at] ^= 1 << (flip % 8);
    }
    assert_eq!(hash(&key, HEAD, &all), before);
}

#[test]
fn what_a_plain_sum_cannot_see_changes_the_digest() {
    let key = key(5);
    let original = bytes(3 * BLOCK);
    let before = hash(&key, HEAD, &original);
    let swapped = |one: usize, other: usize, length: usize| {
        let mut bytes = original.clone();
        for offset in 0..length {
            bytes.swap(one + offset, other + offset);
        }
        assert_ne!(bytes, original);
        hash(&key, HEAD, &bytes)
    };
    for distance in [1, 2, 3, 511, WORDS - 1, WORDS, 2 * WORDS] {
        assert_ne!(swapped(0, 4 * distance, 4), before, "words {distance} apart");
    }
    for row in [64, 1009, 4096] {
        assert_ne!(swapped(0, row, row), before, "rows of {row} bytes");
    }
    assert_ne!(swapped(0, BLOCK, BLOCK), before, "blocks");
    // Two flips of the same bit, whose XOR cancels; a word more in one place and less in another, whose sum cancels.
    let mut bytes = original.clone();
    bytes[3] ^= 0x80;
    bytes[7] ^= 0x80;
    assert_ne!(hash(&key, HEAD, &bytes), before);
    // Zeros: more of them, and elsewhere.
    let zeros = vec![0; 2 * BLOCK + 5];
    let lengths = [0, 1, 3, 4, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5];
    let digests: std::collections::HashSet<_> = lengths.map(|length| hash(&key, HEAD, &zeros[..length])).into();
    assert_eq!(digests.len(), lengths.len());
    let moved: std::collections::HashSet<_> = (0..2 * BLOCK)
        .step_by(509)
        .map(|at| {
            let mut bytes = zeros.clone();
            bytes[at] = 1;
            hash(&key, HEAD, &bytes)
        })
        .collect();
    assert_eq!(moved.len(), (2 * BLOCK).div_ceil(509));
}

/// The counting argument of the module's documentation with words of 6 bits and multipliers of 12, every case of it: no
/// difference and no right side has more than 2^5 solutions, which is 2^-7 of all multipliers; and some have as many.
#[test]
fn the_bound_of_one_sum_holds_in_every_case_of_a_smaller_width() {
    let mut most = 0;
    for difference in (-63_i64..64).filter(|difference| *difference != 0) {
        let mut solutions = [0_u32; 1 << 12];
        for multiplier in 0..1_i64 << 12 {
            solutions[usize::try_from((multiplier * difference).rem_euclid(1 << 12)).unwrap()] += 1;
        }
        most = most.max(*solutions.iter().max().unwrap());
    }
    assert_eq!(most, 1 << 5);
}

/// Both sums of three words of 2 bits under four multipliers of 4 bits, every case: at most (2^-3)^2 of all multipliers
/// make both differences vanish, although the sums share three of their four multipliers.
#[test]
fn the_bound_of_two_sums_holds_in_every_case_of_a_smaller_width() {
    let mut most = 0;
    for code in 0..343 {
        let differences = [code % 7 - 3, code / 7 % 7 - 3, code / 49 - 3];
        if differences == [0; 3] {
            continue;
        }
        let both_vanish = |multipliers: &u32| {
            let multiplier = |index: usize| (multipliers >> (4 * index) & 15).cast_signed();
            [0, 1].into_iter().all(|shift| {
                let sum: i32 = differences.iter().enumerate().map(|(i, d)| d * multiplier(i + shift)).sum();
                sum.rem_euclid(16) == 0
            })
        };
        most = most.max((0..1_u32 << 16).filter(both_vanish).count());
    }
    assert_eq!(most, (1 << 16) >> 6);
}
