//! What a check copies: nothing that lies contiguous in CPU memory, and of anything else a small piece at a time. Alone in
//! its program, since allocations are counted for the whole process.
#![cfg(feature = "raw-engine")]
#![allow(missing_docs)]

mod common;

use common::{patterned, ranks_with};
use sft_sync::{DigestAlgorithm, SyncSession, count_allocations};
use tch::{Kind, Tensor};

#[test]
fn contiguous_tensors_are_not_copied_and_others_in_pieces() {
    ranks_with(
        1,
        |_, builder| builder.threads(2),
        |session| {
            let plain = patterned(0, 1, &[2003, 1009], Kind::Float);
            let wide = patterned(0, 2, &[1009, 2003], Kind::Float);
            for algorithm in [DigestAlgorithm::Sha256, DigestAlgorithm::Blake3, DigestAlgorithm::Fingerprint] {
                let check = |session: &mut SyncSession, tensors: &[(&'static str, Tensor)]| {
                    let named = tensors.iter().map(|(name, tensor)| (*name, tensor.shallow_clone()));
                    drop(session.assert_rank_equal_with(algorithm, named, "check").unwrap());
                };
                let mut peak = |tensors: &[(&'static str, Tensor)]| {
                    // The first call makes what a session keeps.
                    check(session, &[("t", plain.shallow_clone())]);
                    let counted = count_allocations();
                    check(session, tensors);
                    counted()
                };
                let contiguous = peak(&[("a", plain.shallow_clone()), ("b", wide.shallow_clone())]);
                assert_eq!(contiguous.count, 0, "{algorithm}: {contiguous:?}");
                // 8 MiB each, in pieces of at most 512 KiB on two threads.
                let strided = peak(&[("a", plain.tr()), ("b", wide.tr())]);
                assert!(strided.count > 0 && strided.peak_bytes <= 2 << 20, "{algorithm}: {strided:?}");
            }
        },
    );
}
