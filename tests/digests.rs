//! The algorithms that `assert_rank_equal` compares by, on ranks that are threads (invariants I7 and I8).
#![allow(missing_docs)]
// Numbers are small here.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)]

mod common;

use std::collections::BTreeMap;

use common::{build_ranks, patterned, ranks, ranks_with};
use sft_sync::DigestAlgorithm::{self, Blake3, Fingerprint, Sha256};
use sft_sync::{Digest, InProcess, NamedTensor, Rendezvous, SyncError, SyncSession, tensor_digest};
use tch::{Device, Kind, Tensor};

const ALGORITHMS: [DigestAlgorithm; 3] = [Sha256, Blake3, Fingerprint];

/// Every element type that has plain bytes.
const KINDS: [Kind; 17] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::ComplexHalf,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
    Kind::BFloat16,
    Kind::Float8e5m2,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2fnuz,
    Kind::Float8e4m3fnuz,
];

/// Bytes with a prime period.
fn some_bytes(count: usize, salt: usize) -> Vec<u8> {
    (0..count).map(|index| ((index * 7 + index / 251 * 3 + salt * 5) % 251) as u8).collect()
}

fn of_bytes(bytes: &[u8], shape: &[i64], kind: Kind) -> Tensor {
    Tensor::f_from_data_size(bytes, shape, kind).unwrap()
}

/// What one rank finds that the other holds otherwise: names, or nothing where the check passes.
fn differing<T: Into<NamedTensor>>(
    algorithm: DigestAlgorithm,
    world: usize,
    tensors: impl Fn(usize) -> Vec<T> + Sync,
) -> Vec<String> {
    let mut reports =
        ranks(world, |session| match session.assert_rank_equal_with(algorithm, tensors(session.rank()), "check") {
            Ok(verified) => {
                assert_eq!(verified.algorithm(), algorithm);
                Vec::new()
            }
            Err(SyncError::RanksDiffer(report)) => {
                let text = report.to_string();
                assert!(text.contains(algorithm.name()), "{text}");
                report.tensors.iter().map(|tensor| tensor.name.clone()).collect()
            }
            Err(error) => panic!("{error}"),
        });
    assert!(reports.iter().all(|report| *report == reports[0]), "one verdict on all ranks");
    reports.remove(0)
}

#[test]
fn equal_replicas_pass_and_the_odd_one_is_named() {
    for algorithm in ALGORITHMS {
        for world in 1..=4 {
            let equal =
                |_| (0..9).map(|salt| (format!("t{salt}"), patterned(0, salt, &[3, 11], Kind::Float))).collect();
            assert!(differing(algorithm, world, equal).is_empty(), "{algorithm} {world}");
            if world > 1 {
                let culprit = world - 1;
                let found = differing(algorithm, world, |rank| {
                    let odd = |salt| usize::from(rank == culprit && salt == 4);
                    (0..9).map(|salt| (format!("t{salt}"), patterned(odd(salt), salt, &[3, 11], Kind::Float))).collect()
                });
                assert_eq!(found, ["t4"], "{algorithm} {world}");
            }
        }
    }
}

#[test]
fn the_builder_chooses_and_a_call_may_choose_otherwise() {
    let tensor = || [("t", patterned(0, 3, &[5], Kind::Float))];
    let used = ranks_with(
        2,
        |_, builder| builder.digest(Blake3),
        |session| {
            let by_builder = session.assert_rank_equal(tensor(), "check").unwrap();
            let by_call = session.assert_rank_equal_with(Sha256, tensor(), "check").unwrap();
            assert_eq!(by_call.digests().next().unwrap().1, Some(tensor_digest(&tensor()[0].1).unwrap()));
            (by_builder.algorithm(), by_call.algorithm())
        },
    );
    assert_eq!(used, [(Blake3, Sha256); 2]);
}

#[test]
fn ranks_that_choose_differently_are_told_so() {
    let errors = ranks(2, |session| {
        let algorithm = ALGORITHMS[session.rank()];
        let error = session.assert_rank_equal_with(algorithm, [("t", Tensor::from(1.0))], "check").unwrap_err();
        assert!(session.all_agree(0, true).unwrap(), "the session should go on");
        error.to_string()
    });
    assert!(errors.iter().all(|error| error.contains("sha256") && error.contains("blake3")), "{errors:?}");
    let errors = build_ranks(
        2,
        |rank, builder| builder.digest(ALGORITHMS[rank]),
        |session| session.map(drop).unwrap_err().to_string(),
    );
    assert!(
        errors.iter().all(|error| error.contains("digest sha256") && error.contains("digest blake3")),
        "{errors:?}"
    );
}

/// A session of one rank, on this thread.
fn alone(threads: usize) -> SyncSession {
    let place = Rendezvous::InProcess(InProcess::new().unwrap());
    SyncSession::builder().rendezvous(place).rank(0).world_size(1).threads(threads).build().unwrap()
}

/// Digests of one list on one rank.
fn digests(
    session: &mut SyncSession,
    algorithm: DigestAlgorithm,
    tensors: &[(String, Tensor)],
) -> BTreeMap<String, Digest> {
    let named = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    let verified = session.assert_rank_equal_with(algorithm, named, "check").unwrap();
    verified.digests().map(|(name, digest)| (name.to_string(), digest.unwrap())).collect()
}

#[test]
fn every_dtype_at_every_boundary_is_the_official_hash_of_text_and_bytes() {
    let names = |kind| match kind {
        Kind::Uint8 => "uint8",
        Kind::BFloat16 => "bfloat16",
        Kind::ComplexDouble => "complex128",
        Kind::Float => "float32",
        _ => unreachable!(),
    };
    let mut tensors = Vec::new();
    let mut texts = Vec::new();
    for kind in [Kind::Uint8, Kind::BFloat16, Kind::Float, Kind::ComplexDouble] {
        let size = kind.elt_size_in_bytes();
        for edge in [0, 1, 3, 4, 5, 1009, 1024, 8192, 16_384, 65_536, 1 << 17, 1 << 20] {
            for count in [edge / size, edge / size + 1] {
                let bytes = some_bytes(count * size, count);
                let mut text = format!("(torch.Size([{count}]), torch.{})", names(kind)).into_bytes();
                text.extend_from_slice(&bytes);
                tensors.push((format!("{kind:?} {count} {edge}"), of_bytes(&bytes, &[count as i64], kind)));
                texts.push(text);
            }
        }
    }
    let mut session = alone(3);
    let blake3 = digests(&mut session, Blake3, &tensors);
    let sha256 = digests(&mut session, Sha256, &tensors);
    for ((name, tensor), text) in tensors.iter().zip(&texts) {
        assert_eq!(blake3[name].to_string(), ::blake3::hash(text).to_hex().as_str(), "{name}");
        assert_eq!(sha256[name], tensor_digest(tensor).unwrap(), "{name}");
    }
}

/// Each dtype, small and larger than a piece, as it is and in layouts that mean the same.
#[test]
fn strides_and_lazy_bits_never_matter_and_every_bit_of_every_dtype_does() {
    let mut session = alone(2);
    for (algorithm, kind) in ALGORITHMS.into_iter().flat_map(|algorithm| KINDS.map(|kind| (algorithm, kind))) {
        let size = kind.elt_size_in_bytes();
        // The second has more elements than a piece, and rows that are no multiple of it.
        for shape in [[5_usize, 7], [257, 191]] {
            let mut bytes = some_bytes(shape[0] * shape[1] * size, 1);
            if kind == Kind::Bool {
                for byte in &mut bytes {
                    *byte %= 2;
                }
            }
            let shape = shape.map(|length| length as i64);
            let plain = of_bytes(&bytes, &shape, kind);
            let wide = Tensor::cat(&[&plain, &plain], 1);
            let views = [
                ("transposed", plain.tr().contiguous().tr()),
                ("sliced", wide.narrow(1, shape[1], shape[1])),
                ("plain", plain.shallow_clone()),
            ];
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            let other = of_bytes(&bytes, &shape, kind);
            let mut tensors: Vec<(String, Tensor)> =
                views.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
            tensors.push(("other".into(), other));
            if matches!(kind, Kind::ComplexFloat | Kind::ComplexDouble) {
                tensors.push(("conjugate".into(), plain.conj().resolve_conj().conj()));
                assert!(tensors.last().unwrap().1.is_conj());
            }
            let digests = digests(&mut session, algorithm, &tensors);
            for (name, digest) in &digests {
                assert_eq!(*digest == digests["plain"], name != "other", "{algorithm} {kind:?} {shape:?} {name}");
            }
        }
    }
}

#[test]
fn what_sums_would_miss_is_found() {
    let nan = |payload: u32| f32::from_bits(f32::NAN.to_bits() | payload);
    let floats = |values: &[f32]| vec![("a".to_string(), Tensor::from_slice(values))];
    let pair = |swap: bool| {
        let (one, other) = (patterned(0, 1, &[4, 300], Kind::Float), patterned(0, 2, &[4, 300], Kind::Float));
        if swap { vec![("a", other), ("b", one)] } else { vec![("a", one), ("b", other)] }
    };
    let rows = |order: [i64; 4]| vec![("a", pair(false).remove(0).1.index_select(0, &Tensor::from_slice(&order)))];
    for algorithm in ALGORITHMS {
        let one_differs = |tensors: &(dyn Fn(bool) -> Vec<(String, Tensor)> + Sync)| {
            differing(algorithm, 2, |rank| tensors(rank == 1))
        };
        for (one, other) in [
            (&[1.0_f32, 2.0, 0.5][..], &[2.0_f32, 1.0, 0.5][..]),
            (&[0.0], &[-0.0]),
            (&[nan(0)], &[nan(1)]),
            (&[nan(1), 0.0], &[nan(2), 0.0]),
            (&[0.0, 0.0, 3.0], &[3.0, 0.0, 0.0]),
            (&[0.0, 0.0], &[0.0, 0.0, 0.0]),
            (&[], &[0.0]),
        ] {
            let found = one_differs(&|changed| floats(if changed { other } else { one }));
            assert_eq!(found, ["a"], "{algorithm}: {one:?} {other:?}");
        }
        assert_eq!(differing(algorithm, 2, |rank| pair(rank == 1)), ["a", "b"], "{algorithm}");
        assert_eq!(differing(algorithm, 2, |rank| rows(if rank == 1 { [0, 3, 2, 1] } else { [0, 1, 2, 3] })), ["a"]);
        // The same bytes under another shape or dtype.
        let zeros = |shape: &[i64], kind| vec![("a", Tensor::zeros(shape, (kind, Device::Cpu)))];
        assert_eq!(
            differing(algorithm, 2, |rank| zeros(if rank == 1 { &[2, 3] } else { &[3, 2] }, Kind::Float)),
            ["a"]
        );
        assert_eq!(differing(algorithm, 2, |rank| zeros(&[4], if rank == 1 { Kind::Int } else { Kind::Float })), ["a"]);
        let absent = |rank| vec![("a", (rank == 0).then(|| Tensor::zeros([0], (Kind::Float, Device::Cpu))))];
        assert_eq!(differing(algorithm, 2, absent), ["a"]);
    }
}

#[test]
fn a_fingerprint_means_nothing_in_another_check_or_session() {
    let tensors = || [("t".to_string(), patterned(0, 3, &[5], Kind::Float))];
    let rounds = || {
        let by_rank =
            ranks(3, |session| [0; 2].map(|_| digests(session, Fingerprint, &tensors()).remove("t").unwrap()));
        assert!(by_rank.iter().all(|digests| *digests == by_rank[0]), "ranks share the key");
        by_rank[0]
    };
    let (first, second) = (rounds(), rounds());
    let all: std::collections::HashSet<Digest> = first.into_iter().chain(second).collect();
    assert_eq!(all.len(), 4);
}

#[test]
fn threads_change_nothing() {
    let tensors = || {
        let mut tensors: Vec<(String, Tensor)> = (0..40)
            .map(|salt| (format!("t{salt}"), patterned(0, salt, &[3, 1 + salt as i64 * 50], Kind::Float)))
            .collect();
        tensors.push(("large".into(), patterned(0, 1, &[1009, 1500], Kind::Float)));
        tensors.push(("strided".into(), patterned(0, 2, &[1009, 500], Kind::Float).tr()));
        tensors
    };
    // A fingerprint's key is its session's: it is ranks of one session that use different numbers of threads.
    for algorithm in ALGORITHMS {
        let by_rank = ranks_with(
            3,
            |rank, builder| builder.threads([1, 2, 5][rank]),
            |session| digests(session, algorithm, &tensors()),
        );
        assert!(by_rank.iter().all(|digests| *digests == by_rank[0]), "{algorithm}");
    }
}
