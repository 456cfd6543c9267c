//! `assert_rank_equal` on ranks that are threads (invariants I7 and I8).
#![allow(missing_docs)]
// Numbers are small here.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod common;

use common::{WORLDS, patterned, ranks};
use sft_sync::{Divergence, NamedTensor, Result, SyncError, SyncSession, TensorProblem, Verified, tensor_digest};
use tch::{Device, Kind, Tensor};

/// All ranks hold the same report.
#[track_caller]
fn differ(world: usize, check: impl Fn(&mut SyncSession) -> Result<Verified> + Sync) -> Divergence {
    let mut reports = ranks(world, |session| {
        let error = check(session).unwrap_err();
        assert!(error.is_disagreement());
        assert!(session.all_agree(0, true).unwrap(), "the session should go on");
        let SyncError::RanksDiffer(report) = error else { panic!("{error}") };
        *report
    });
    assert!(reports.iter().all(|report| *report == reports[0]), "one report on all ranks");
    reports.remove(0)
}

/// A bit of the `index`-th element turned over, whatever the dtype is.
fn flipped(tensor: &Tensor, index: i64) -> Tensor {
    let copy = tensor.copy();
    let mut bits = copy.view_dtype(Kind::Int).view([-1]);
    let _ = bits.get(index).bitwise_xor_(1_i64);
    bits = bits.view_dtype(tensor.kind());
    bits.view(tensor.size().as_slice())
}

#[test]
fn equal_replicas_pass_at_every_world_size() {
    for world in WORLDS {
        let verified = ranks(world, |session| {
            let named =
                || (0..20).map(|salt| (format!("t{salt:02}"), patterned(0, salt, &[3, salt as i64], Kind::Float)));
            // In another order on every other rank.
            let mut tensors: Vec<_> = named().collect();
            if session.rank() % 2 == 1 {
                tensors.reverse();
            }
            let verified = session.assert_rank_equal(tensors, "start").unwrap();
            assert_eq!((verified.phase(), verified.digests().count()), ("start", 20));
            let (name, digest) = verified.digests().nth(7).unwrap();
            assert_eq!((name, digest), ("t07", Some(tensor_digest(&patterned(0, 7, &[3, 7], Kind::Float)).unwrap())));
            verified.root()
        });
        assert!(verified.iter().all(|root| *root == verified[0]));
    }
}

#[test]
fn one_flipped_bit_is_found_and_named_whoever_holds_it() {
    for world in [2, 3, 4, 7] {
        for culprit in [0, world - 1] {
            let report = differ(world, |session| {
                let mut tensors: Vec<(String, Tensor)> =
                    (0..9).map(|salt| (format!("t{salt}"), patterned(0, salt, &[11], Kind::Float))).collect();
                if session.rank() == culprit {
                    tensors[4].1 = flipped(&tensors[4].1, 10);
                }
                session.assert_rank_equal(tensors, "checkpoint")
            });
            assert_eq!((report.compared, report.tensors.len()), (9, 1));
            let tensor = &report.tensors[0];
            assert_eq!((tensor.name.as_str(), tensor.sides.len()), ("t4", 2));
            let odd_one = tensor.sides.iter().find(|side| side.ranks == [culprit]).unwrap();
            assert!(odd_one.value.starts_with("float32 [11]"), "{}", odd_one.value);
            match tensor.majority {
                None => assert_eq!(world, 2, "only two ranks cannot tell"),
                Some(side) => assert_eq!(tensor.sides[side].ranks.len(), world - 1),
            }
            let text = report.to_string();
            assert!(text.contains("1 of 9 tensors") && text.contains("checkpoint") && text.contains("t4"), "{text}");
            assert_eq!(text.contains("no majority"), world == 2, "{text}");
        }
    }
}

#[test]
fn the_first_differing_element_is_shown_with_its_values() {
    for world in [2, 3, 5] {
        let report = differ(world, |session| {
            // 3.4 chunks of 1 MiB; the second and the last differ, the first difference is in the second.
            let tensor = patterned(0, 0, &[900, 1000], Kind::Float);
            if session.rank() == 1 {
                let _ = tensor.get(300).get(7).fill_(1234.5);
                let _ = tensor.get(899).get(999).fill_(-1.0);
            }
            // What comes earlier in the list and is not comparable does not matter.
            let other = Tensor::zeros([2 + i64::from(session.rank() == 1)], (Kind::Float, Device::Cpu));
            session.assert_rank_equal([("a", other), ("b", tensor.transpose(0, 1).contiguous().transpose(0, 1))], "end")
        });
        assert_eq!(report.tensors.len(), 2);
        let first = report.first.as_ref().unwrap();
        assert_eq!((first.tensor.as_str(), first.index.as_slice()), ("b", [300, 7].as_slice()));
        assert_eq!((first.chunks, first.chunks_differing), (4, 2));
        let usual = common::pattern(0, 0, 900_000)[300_007];
        assert!(first.sides[0].value.starts_with(&format!("{usual:?} (0x")), "{:?}", first.sides);
        assert_eq!(first.sides[1].value, "1234.5 (0x449a5000)");
        assert_eq!((first.sides[0].ranks.len(), first.sides[1].ranks.as_slice()), (world - 1, [1].as_slice()));
        let text = report.to_string();
        assert!(text.contains("first in b at [300, 7]") && text.contains("2 of its 4 chunks"), "{text}");
    }
}

#[test]
fn shape_dtype_presence_and_names_matter() {
    let zeros = |shape: &[i64], kind| Tensor::zeros(shape, (kind, Device::Cpu));
    let report = differ(2, |session| {
        let first = session.rank() == 0;
        let tensors: Vec<NamedTensor> = vec![
            ("equal", Some(zeros(&[2], Kind::Float))).into(),
            ("shape", Some(zeros(if first { &[2, 3] } else { &[3, 2] }, Kind::Float))).into(),
            ("dtype", Some(zeros(&[4], if first { Kind::Int } else { Kind::Float }))).into(),
            ("presence", first.then(|| zeros(&[1], Kind::Float))).into(),
            ("none", None::<Tensor>).into(),
            (if first { "left" } else { "right" }, None::<Tensor>).into(),
        ];
        session.assert_rank_equal(tensors, "start")
    });
    let names: Vec<&str> = report.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["dtype", "left", "presence", "right", "shape"]);
    assert_eq!(report.compared, 7);
    assert_eq!(report.tensors[1].sides[0].value, "no tensor");
    assert_eq!(report.tensors[1].sides[1].value, "nothing under that name");
    assert_eq!(report.first, None, "nothing here can be compared element by element");
}

#[test]
fn reports_of_many_tensors_stay_short() {
    let report = differ(3, |session| {
        let rank = session.rank();
        session.assert_rank_equal(
            (0..500).map(|salt| (format!("t{salt:03}"), patterned(rank, salt, &[3], Kind::Float))),
            "end",
        )
    });
    assert_eq!(report.tensors.len(), 500);
    assert!(report.tensors.iter().all(|tensor| tensor.majority.is_none() && tensor.sides.len() == 3));
    let text = report.to_string();
    assert!(text.lines().count() <= 20 && text.contains("and 492 more"), "{text}");
}

#[test]
fn sign_of_zero_and_payload_of_nan_matter() {
    for (one, other) in [(0.0_f32, -0.0_f32), (f32::NAN, f32::from_bits(f32::NAN.to_bits() | 1))] {
        let report = differ(2, |session| {
            let value = if session.rank() == 0 { one } else { other };
            session.assert_rank_equal([("t", Tensor::from_slice(&[value]))], "end")
        });
        assert_eq!(report.tensors.len(), 1);
    }
}

#[test]
fn what_cannot_be_hashed_is_refused_by_all() {
    type Spoil = fn() -> Vec<(&'static str, Tensor)>;
    let spoil: [(TensorProblem, Spoil); 3] = [
        (TensorProblem::Undefined, || vec![("t", Tensor::new())]),
        (TensorProblem::Sparse, || {
            vec![("t", patterned(0, 0, &[3], Kind::Float).to_sparse(None::<tch::Layout>, None::<&[i64]>, None))]
        }),
        (TensorProblem::DuplicateName, || {
            vec![("t", patterned(0, 0, &[3], Kind::Float)), ("t", patterned(0, 1, &[3], Kind::Float))]
        }),
    ];
    for (problem, tensors) in spoil {
        let errors = ranks(3, |session| {
            let tensors = if session.rank() == 1 { tensors() } else { vec![("t", patterned(0, 0, &[3], Kind::Float))] };
            session.assert_rank_equal(tensors, "end").unwrap_err()
        });
        for error in errors {
            let SyncError::Refused(refusal) = &error else { panic!("{error}") };
            assert_eq!((refusal.rank, &refusal.error.problem), (1, &problem));
        }
    }
}

#[test]
fn strides_never_matter() {
    use proptest::prelude::*;
    proptest!(ProptestConfig::with_cases(64), |(
        shape in proptest::collection::vec(0_i64..5, 1..5),
        order in any::<u64>(),
        salt in 0_usize..13,
    )| {
        let plain = patterned(1, salt, &shape, Kind::Float);
        let dims = shape.len() as i64;
        let (a, b) = ((order % dims as u64) as i64, (order / 7 % dims as u64) as i64);
        let strided = plain.transpose(a, b).contiguous().transpose(a, b);
        let sliced = Tensor::stack(&[&plain, &plain.zeros_like()], 0).transpose(0, -1).contiguous().transpose(0, -1).select(0, 0);
        let expected = tensor_digest(&plain).unwrap();
        prop_assert_eq!(tensor_digest(&strided).unwrap(), expected);
        prop_assert_eq!(tensor_digest(&sliced).unwrap(), expected);
    });
}

#[test]
fn lazy_conjugates_and_negations_are_resolved() {
    let complex = Tensor::complex(&patterned(0, 1, &[2, 3], Kind::Float), &patterned(0, 2, &[2, 3], Kind::Float));
    let conjugate = complex.conj();
    assert!(conjugate.is_conj());
    assert_eq!(tensor_digest(&conjugate).unwrap(), tensor_digest(&conjugate.resolve_conj()).unwrap());
    let negative = conjugate.imag();
    assert!(negative.is_neg());
    assert_eq!(tensor_digest(&negative).unwrap(), tensor_digest(&negative.resolve_neg()).unwrap());
    assert_ne!(tensor_digest(&conjugate).unwrap(), tensor_digest(&complex).unwrap());
}
