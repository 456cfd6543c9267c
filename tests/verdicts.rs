//! Whatever one rank refuses or does differently is the same typed error on every rank, in the same call, before anything
//! has moved (invariants I9 and I13), and the session goes on afterwards.
#![allow(missing_docs)]
// Numbers are small here.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod common;

use common::{build_ranks, parameter, patterned, ranks, ranks_with, set_gradient, values};
use sft_sync::{
    DesynchronizedField, NamedTensor, Parameters, Result, SyncError, SyncSession, TensorProblem, Transport,
};
use tch::{Device, Kind, Tensor};

fn list(named: &[(&str, &Tensor)]) -> Parameters {
    Parameters::from_named(named.iter().map(|(name, tensor)| (*name, tensor.shallow_clone()))).unwrap()
}

/// A leaf with a gradient.
fn trained(rank: usize, salt: usize, shape: &[i64], kind: Kind) -> Tensor {
    let tensor = parameter(0, salt, shape, kind);
    set_gradient(&tensor, &patterned(rank, salt, shape, kind));
    tensor
}

/// All ranks hold the same error, a disagreement, and can still work together.
#[track_caller]
fn same_error<T: std::fmt::Debug>(
    world: usize,
    call: impl Fn(&mut SyncSession) -> Result<T> + Sync,
    check: impl Fn(&SyncError) -> bool,
) -> String {
    let errors = ranks(world, |session| {
        let error = call(session).unwrap_err();
        assert!(error.is_disagreement() && !error.needs_rebuild() && !error.is_interrupted(), "{error}");
        assert_eq!(session.sum(99, 1_u64).unwrap(), world as u64, "the session should go on");
        error
    });
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "one verdict, not {texts:#?}");
    assert!(check(&errors[0]), "unexpected: {:?}", errors[0]);
    texts[0].clone()
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// One rank refuses because of `spoil`ed parameters.
#[track_caller]
fn refused(problem: &TensorProblem, spoil: impl Fn(&Tensor, &Tensor) -> Vec<(&'static str, Tensor)> + Sync) {
    let text = same_error(
        3,
        |session| {
            let (a, b) =
                (trained(session.rank(), 0, &[2, 3], Kind::Float), trained(session.rank(), 1, &[4], Kind::Float));
            let named = if session.rank() == 2 {
                spoil(&a, &b)
            } else {
                vec![("a", a.shallow_clone()), ("b", b.shallow_clone())]
            };
            let parameters = Parameters::from_named(named).unwrap();
            let result = session.synchronize_gradients(5, &parameters);
            assert!(!a.grad().defined() || session.rank() == 2, "an error withdraws the gradients");
            assert!(parameters.iter().all(|(_, tensor)| !tensor.defined() || !tensor.grad().defined()));
            result
        },
        |error| matches!(error, SyncError::Refused(refusal) if refusal.rank == 2 && refusal.error.problem == *problem),
    );
    assert_contains(&text, &["refused by rank 2", "step 5", "synchronize_gradients"]);
}

/// A parameter whose gradient has other data than autograd would give it.
fn with_gradient(parameter: &Tensor, gradient: &Tensor) -> Tensor {
    parameter.grad().set_data(gradient);
    parameter.shallow_clone()
}

#[test]
fn a_sparse_gradient_is_refused_by_all() {
    refused(&TensorProblem::SparseGradient, |_, b| {
        let weight = parameter(0, 0, &[2, 3], Kind::Float);
        Tensor::embedding(&weight, &Tensor::from_slice(&[1_i64]), -1, false, true).sum(Kind::Float).backward();
        assert!(weight.grad().is_sparse());
        vec![("a", weight), ("b", b.shallow_clone())]
    });
}

#[test]
fn an_undefined_tensor_is_refused_by_all() {
    refused(&TensorProblem::Undefined, |_, b| vec![("a", Tensor::new()), ("b", b.shallow_clone())]);
}

#[test]
fn a_sparse_parameter_is_refused_by_all() {
    refused(&TensorProblem::Sparse, |_, b| {
        vec![
            ("a", patterned(0, 0, &[2, 3], Kind::Float).to_sparse(None::<tch::Layout>, None::<&[i64]>, None)),
            ("b", b.shallow_clone()),
        ]
    });
}

#[test]
fn a_quantized_parameter_is_refused_by_all() {
    refused(&TensorProblem::Quantized { dtype: "qint8".into() }, |a, b| {
        vec![("a", a.detach().quantize_per_tensor(0.1, 0, Kind::QInt8)), ("b", b.shallow_clone())]
    });
}

#[test]
fn a_gradient_of_another_shape_is_refused_by_all() {
    let problem = TensorProblem::GradientShape { parameter: vec![2, 3], gradient: vec![3, 2] };
    refused(&problem, |a, b| {
        vec![("a", with_gradient(a, &Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)))), ("b", b.shallow_clone())]
    });
}

#[test]
fn parameters_that_overlap_are_refused_by_all() {
    refused(&TensorProblem::Overlap { other: "a".into() }, |_, _| {
        let whole = patterned(0, 0, &[10], Kind::Float);
        vec![("a", whole.narrow(0, 0, 6)), ("b", whole.narrow(0, 5, 4))]
    });
}

#[test]
fn gradients_that_overlap_are_refused_by_all() {
    refused(&TensorProblem::GradientOverlap { other: "a".into() }, |a, b| {
        let whole = patterned(0, 0, &[9], Kind::Float);
        vec![
            ("a", with_gradient(a, &whole.narrow(0, 0, 6).reshape([2, 3]))),
            ("b", with_gradient(b, &whole.narrow(0, 5, 4))),
        ]
    });
}

#[test]
fn one_gradient_for_two_parameters_is_refused_by_all() {
    refused(&TensorProblem::GradientOverlap { other: "a".into() }, |_, _| {
        let (a, b) = (trained(2, 0, &[4], Kind::Float), trained(2, 1, &[4], Kind::Float));
        let shared = a.grad();
        vec![("a", a), ("b", with_gradient(&b, &shared))]
    });
}

#[test]
fn a_dtype_that_gloo_cannot_sum_is_refused_by_all() {
    let text = same_error(
        2,
        |session| {
            let tensor = trained(session.rank(), 0, &[3], Kind::ComplexFloat);
            session.synchronize_gradients(0, &list(&[("spectrum", &tensor)]))
        },
        |error| matches!(error, SyncError::Refused(_)),
    );
    assert_contains(&text, &["spectrum", "complex64", "refused too by rank 1"]);
}

#[test]
fn another_operation_is_told() {
    let text = same_error(
        3,
        |session| {
            let parameters = list(&[("p", &trained(session.rank(), 0, &[3], Kind::Float))]);
            if session.rank() == 1 {
                session.broadcast_trainable_parameters(&parameters)
            } else {
                session.synchronize_gradients(8, &parameters)
            }
        },
        |error| matches!(error, SyncError::Desynchronized(d) if d.field == DesynchronizedField::Operation && d.sides.len() == 2),
    );
    assert_contains(&text, &["ranks 0, 2: synchronize_gradients (step 8", "rank 1: broadcast_trainable_parameters"]);
}

#[test]
fn another_step_is_told() {
    let text = same_error(
        3,
        |session| {
            let parameters = list(&[("p", &trained(session.rank(), 0, &[3], Kind::Float))]);
            let step = if session.rank() == 0 { 12 } else { 11 };
            session.synchronize_gradients(step, &parameters)
        },
        |error| matches!(error, SyncError::Desynchronized(d) if d.field == DesynchronizedField::Step),
    );
    assert_contains(&text, &["rank 0: synchronize_gradients (step 12", "ranks 1, 2: synchronize_gradients (step 11"]);
}

#[test]
fn another_phase_is_told() {
    let text = same_error(
        2,
        |session| {
            let phase = if session.rank() == 0 { "checkpoint" } else { "start" };
            session.assert_rank_equal(Vec::<NamedTensor>::new(), phase)
        },
        |error| matches!(error, SyncError::Desynchronized(d) if d.field == DesynchronizedField::Phase),
    );
    assert_contains(&text, &["phase \"checkpoint\"", "phase \"start\""]);
}

#[test]
fn another_type_of_sum_is_told() {
    same_error(
        2,
        |session| if session.rank() == 0 { session.sum(0, 1_u64).map(drop) } else { session.sum(0, 1.0_f64).map(drop) },
        |error| matches!(error, SyncError::Desynchronized(d) if d.field == DesynchronizedField::Content),
    );
}

/// Rank 1 holds other parameters.
#[track_caller]
fn schema_differs(name: &str, parts: &[&str], other: impl Fn(usize) -> Vec<(&'static str, Tensor)> + Sync) {
    let text = same_error(
        3,
        |session| {
            let rank = session.rank();
            let named = if rank == 1 {
                other(rank)
            } else {
                vec![
                    ("a", trained(rank, 0, &[2, 3], Kind::Float)),
                    ("b", trained(rank, 1, &[6], Kind::Float)),
                    ("c", trained(rank, 2, &[5], Kind::Float)),
                ]
            };
            session.synchronize_gradients(3, &Parameters::from_named(named).unwrap())
        },
        |error| matches!(error, SyncError::SchemaDiffers(difference) if difference.name == name),
    );
    assert_contains(&text, parts);
}

#[test]
fn another_shape_is_shown_side_by_side() {
    schema_differs(
        "b",
        &["ranks 0, 2: float32 [6] on cpu, trainable; rank 1: float32 [3, 2] on cpu, trainable"],
        |rank| {
            vec![
                ("a", trained(rank, 0, &[2, 3], Kind::Float)),
                ("b", trained(rank, 1, &[3, 2], Kind::Float)),
                ("c", trained(rank, 2, &[5], Kind::Float)),
            ]
        },
    );
}

#[test]
fn another_dtype_is_shown_side_by_side() {
    schema_differs("c", &["rank 1: float64 [5]"], |rank| {
        vec![
            ("a", trained(rank, 0, &[2, 3], Kind::Float)),
            ("b", trained(rank, 1, &[6], Kind::Float)),
            ("c", trained(rank, 2, &[5], Kind::Double)),
        ]
    });
}

#[test]
fn swapped_parameters_are_told() {
    schema_differs("a", &["rank 1: float32 [6]"], |rank| {
        vec![
            ("a", trained(rank, 1, &[6], Kind::Float)),
            ("b", trained(rank, 0, &[2, 3], Kind::Float)),
            ("c", trained(rank, 2, &[5], Kind::Float)),
        ]
    });
}

#[test]
fn a_missing_parameter_is_told() {
    schema_differs("b", &["rank 1: no such parameter"], |rank| {
        vec![("a", trained(rank, 0, &[2, 3], Kind::Float)), ("c", trained(rank, 2, &[5], Kind::Float))]
    });
}

#[test]
fn a_missing_last_parameter_is_told() {
    schema_differs("c", &["rank 1: no such parameter"], |rank| {
        vec![("a", trained(rank, 0, &[2, 3], Kind::Float)), ("b", trained(rank, 1, &[6], Kind::Float))]
    });
}

#[test]
fn another_name_is_told() {
    schema_differs("b", &["rank 1: no such parameter"], |rank| {
        vec![
            ("a", trained(rank, 0, &[2, 3], Kind::Float)),
            ("bb", trained(rank, 1, &[6], Kind::Float)),
            ("c", trained(rank, 2, &[5], Kind::Float)),
        ]
    });
}

#[test]
fn another_requires_grad_is_told() {
    schema_differs("c", &["rank 1: float32 [5] on cpu, frozen"], |rank| {
        vec![
            ("a", trained(rank, 0, &[2, 3], Kind::Float)),
            ("b", trained(rank, 1, &[6], Kind::Float)),
            ("c", patterned(rank, 2, &[5], Kind::Float)),
        ]
    });
}

#[test]
fn other_aliases_are_told() {
    let text = same_error(
        2,
        |session| {
            let (a, b) = (trained(session.rank(), 0, &[4], Kind::Float), trained(session.rank(), 1, &[4], Kind::Float));
            let second = if session.rank() == 0 { &a } else { &b };
            session.synchronize_gradients(0, &list(&[("embedding", &a), ("head", second)]))
        },
        |error| matches!(error, SyncError::SchemaDiffers(_)),
    );
    assert_contains(&text, &["head", "rank 0: the same tensor as \"embedding\""]);
}

#[test]
fn other_options_are_told_when_connecting() {
    let errors = build_ranks(
        3,
        |rank, builder| if rank == 1 { builder.bucket_bytes(1000).transport(Transport::Flat) } else { builder },
        |session| session.unwrap_err(),
    );
    for error in &errors {
        assert!(matches!(error, SyncError::Desynchronized(d) if d.field == DesynchronizedField::Options), "{error}");
        assert_contains(
            &error.to_string(),
            &["rank 1: bucket_bytes 1000, transport Flat", "ranks 0, 2: bucket_bytes 33554432"],
        );
    }
}

#[test]
fn tokens_that_no_rank_has_are_told() {
    let text = same_error(
        2,
        |session| {
            let parameters = list(&[("p", &trained(session.rank(), 0, &[3], Kind::Float))]);
            session.synchronize_gradients_per_token(2, &parameters, 0)
        },
        |error| matches!(error, SyncError::Uncountable { .. }),
    );
    assert_contains(&text, &["step 2", "no rank has any token"]);
}

#[test]
fn a_sum_that_does_not_fit_is_told() {
    same_error(2, |session| session.sum(0, u64::MAX), |error| matches!(error, SyncError::Uncountable { .. }));
}

#[test]
fn sums_are_the_same_everywhere() {
    for world in common::WORLDS {
        ranks(world, |session| {
            let rank = session.rank();
            assert_eq!(session.sum(0, rank + 1).unwrap(), world * (world + 1) / 2);
            assert_eq!(session.sum(1, -(rank as i64)).unwrap(), -((world * (world - 1) / 2) as i64));
            // Not associative: every rank must add in the same order.
            let sum: f64 = session.sum(2, if rank == 0 { 1e16 } else { 1.0 }).unwrap();
            let expected = (1..world).fold(1e16, |sum, _| sum + 1.0);
            assert_eq!(sum.to_bits(), f64::to_bits(expected));
        });
    }
}

#[test]
fn all_agree_is_an_and() {
    for world in common::WORLDS {
        ranks(world, |session| {
            assert!(session.all_agree(0, true).unwrap());
            for dissenter in 0..world {
                assert!(!session.all_agree(1, session.rank() != dissenter).unwrap());
            }
            assert!(session.all_agree(2, true).unwrap());
        });
    }
}

#[test]
fn names_that_occur_twice_are_refused_where_they_are_listed() {
    let tensor = parameter(0, 0, &[1], Kind::Float);
    let error = Parameters::from_named([("a", tensor.shallow_clone()), ("a", tensor.shallow_clone())]).unwrap_err();
    assert!(
        matches!(&error, SyncError::Tensor(error) if error.problem == TensorProblem::DuplicateName && error.tensor == "a")
    );
}

#[test]
fn a_refusal_leaves_parameters_as_they_were() {
    ranks_with(
        2,
        |_, builder| builder,
        |session| {
            let good = parameter(session.rank(), 0, &[4], Kind::Float);
            let bad = parameter(session.rank(), 1, &[1], Kind::Float);
            let bad = if session.rank() == 1 {
                bad.detach().expand([4], false)
            } else {
                parameter(0, 1, &[4], Kind::Float).detach()
            };
            let before = values(&good);
            let error = session.broadcast_trainable_parameters(&list(&[("bad", &bad), ("good", &good)])).unwrap_err();
            assert!(
                matches!(&error, SyncError::Refused(refusal) if refusal.error.problem == TensorProblem::Expanded && refusal.rank == 1)
            );
            assert_eq!(values(&good), before);
        },
    );
}
