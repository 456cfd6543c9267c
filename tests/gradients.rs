//! `synchronize_gradients` on ranks that are threads: used masks, buckets, layouts, transports, reduction types.
#![allow(missing_docs)]
// Numbers are small here.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod common;

use common::{WORLDS, parameter, pattern, patterned, ranks, ranks_with, set_gradient, values};
use sft_sync::{FencePolicy, Parameters, SyncSession, Transport};
use tch::{Device, Kind, Tensor};

fn list(named: &[(&str, &Tensor)]) -> Parameters {
    Parameters::from_named(named.iter().map(|(name, tensor)| (*name, tensor.shallow_clone()))).unwrap()
}

/// The sum over ranks of what [`pattern`] gives each.
fn summed(world: usize, salt: usize, numel: usize) -> Vec<f64> {
    (0..numel).map(|index| (0..world).map(|rank| pattern(rank, salt, numel)[index]).sum()).collect()
}

#[test]
fn gradients_are_summed_at_any_bucket_limit_and_line() {
    // Shapes around the limits in use below: 1 element, below, at and above a bucket, and a prime number of them.
    let shapes: [&[i64]; 6] = [&[1], &[2, 3], &[16], &[17], &[61], &[4, 4, 4]];
    for world in WORLDS {
        for (bucket, line) in [(1, 1), (64, 32), (100, 1 << 20), (32 << 20, 64), (32 << 20, 1 << 20)] {
            for transport in [Transport::InPlace, Transport::Flat] {
                ranks_with(
                    world,
                    |_, builder| builder.bucket_bytes(bucket).in_place_bytes(line).transport(transport),
                    |session| {
                        let rank = session.rank();
                        let tensors: Vec<Tensor> = shapes
                            .iter()
                            .enumerate()
                            .map(|(salt, shape)| parameter(0, salt, shape, Kind::Float))
                            .collect();
                        for (salt, tensor) in tensors.iter().enumerate() {
                            set_gradient(tensor, &patterned(rank, salt, &tensor.size(), Kind::Float));
                        }
                        let parameters = Parameters::from_named(
                            tensors
                                .iter()
                                .enumerate()
                                .map(|(salt, tensor)| (format!("p{salt}"), tensor.shallow_clone())),
                        )
                        .unwrap();
                        let report = session.synchronize_gradients(0, &parameters).unwrap();
                        assert_eq!((report.active, report.globally_unused, report.locally_absent), (6, 0, 0));
                        assert_eq!(report.bytes, 4 * (1 + 6 + 16 + 17 + 61 + 64));
                        for (salt, tensor) in tensors.iter().enumerate() {
                            assert_eq!(
                                values(&tensor.grad()),
                                summed(world, salt, tensor.numel()),
                                "p{salt}, {world} ranks"
                            );
                        }
                    },
                );
            }
        }
    }
}

#[test]
fn every_dtype_that_gloo_sums_is_summed() {
    for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16] {
        ranks(3, |session| {
            let tensor = parameter(0, 1, &[29], kind);
            set_gradient(&tensor, &patterned(session.rank(), 1, &[29], kind));
            session.synchronize_gradients(0, &list(&[("p", &tensor)])).unwrap();
            assert_eq!(tensor.grad().kind(), kind);
            assert_eq!(values(&tensor.grad()), summed(3, 1, 29), "{kind:?}");
        });
    }
}

#[test]
fn a_change_of_dtype_closes_a_bucket() {
    ranks(2, |session| {
        let (a, b, c) = (
            parameter(0, 0, &[4], Kind::Float),
            parameter(0, 1, &[4], Kind::Double),
            parameter(0, 2, &[4], Kind::Float),
        );
        for tensor in [&a, &b, &c] {
            set_gradient(tensor, &patterned(session.rank(), 3, &[4], tensor.kind()));
        }
        let report = session.synchronize_gradients(0, &list(&[("a", &a), ("b", &b), ("c", &c)])).unwrap();
        assert_eq!(report.buckets, 3);
        for tensor in [&a, &b, &c] {
            assert_eq!(values(&tensor.grad()), summed(2, 3, 4));
        }
    });
}

#[test]
fn unused_gradients_stay_undefined_and_half_used_ones_are_summed() {
    for world in WORLDS {
        ranks(world, |session| {
            let (all, some, none) = (
                parameter(0, 0, &[5], Kind::Float),
                parameter(0, 1, &[7], Kind::Float),
                parameter(0, 2, &[3], Kind::Float),
            );
            let last = world - 1;
            set_gradient(&all, &patterned(session.rank(), 0, &[5], Kind::Float));
            if session.rank() == last {
                set_gradient(&some, &patterned(last, 1, &[7], Kind::Float));
            }
            let parameters = list(&[("all", &all), ("none", &none), ("some", &some)]);
            let report = session.synchronize_gradients(0, &parameters).unwrap();
            assert_eq!((report.active, report.globally_unused), (2, 1));
            assert_eq!(report.locally_absent, usize::from(session.rank() != last));
            assert!(!none.grad().defined());
            assert_eq!(values(&some.grad()), pattern(last, 1, 7));
            assert_eq!(values(&all.grad()), summed(world, 0, 5));
        });
    }
}

#[test]
fn masks_longer_than_a_frame_are_exchanged() {
    // 1984 bits fit into a frame: below, at, above, and far above.
    for count in [1983, 1984, 1985, 100_000] {
        ranks(3, |session| {
            let tensors: Vec<Tensor> =
                (0..count).map(|_| Tensor::zeros([1], (Kind::Float, Device::Cpu)).set_requires_grad(true)).collect();
            let uses = |rank: usize, index: usize| index % 1009 == rank * 13 || index + 1 == count && rank == 2;
            let used: Vec<&Tensor> =
                (0..count).filter(|index| uses(session.rank(), *index)).map(|index| &tensors[index]).collect();
            Tensor::stack(&used, 0).sum(Kind::Float).backward();
            let parameters = Parameters::from_named(
                tensors.iter().enumerate().map(|(index, tensor)| (format!("{index:06}"), tensor.shallow_clone())),
            )
            .unwrap();
            session.synchronize_gradients(0, &parameters).unwrap();
            for (index, tensor) in tensors.iter().enumerate() {
                let users = (0..3).filter(|rank| uses(*rank, index)).count();
                let grad = tensor.grad();
                assert_eq!(grad.defined(), users > 0, "parameter {index} of {count}");
                if users > 0 {
                    assert_eq!(values(&grad), [users as f64], "parameter {index} of {count}");
                }
            }
        });
    }
}

#[test]
fn an_empty_list_and_empty_tensors_are_fine() {
    for world in WORLDS {
        ranks(world, |session| {
            let nothing = Parameters::from_named(Vec::<(String, Tensor)>::new()).unwrap();
            assert!(nothing.is_empty());
            let report = session.synchronize_gradients(0, &nothing).unwrap();
            assert_eq!((report.buckets, report.bytes), (0, 0));
            session.broadcast_trainable_parameters(&nothing).unwrap();

            let (empty, scalar) = (parameter(0, 0, &[0, 3], Kind::Float), parameter(0, 1, &[], Kind::Float));
            set_gradient(&empty, &patterned(session.rank(), 0, &[0, 3], Kind::Float));
            set_gradient(&scalar, &patterned(session.rank(), 1, &[], Kind::Float));
            session.synchronize_gradients(1, &list(&[("empty", &empty), ("scalar", &scalar)])).unwrap();
            assert_eq!(empty.grad().size(), [0, 3]);
            assert_eq!(values(&scalar.grad()), summed(world, 1, 1));
        });
    }
}

/// Gives the gradient of a leaf any layout: the handle shares the gradient's autograd tensor, so its data can be swapped.
fn set_raw_gradient(parameter: &Tensor, gradient: &Tensor) {
    set_gradient(parameter, &Tensor::ones(gradient.size(), (parameter.kind(), Device::Cpu)));
    parameter.grad().set_data(gradient);
}

#[test]
fn layouts_may_differ_between_ranks() {
    let layouts: [fn(&Tensor) -> Tensor; 5] = [
        Tensor::shallow_clone,
        |dense| dense.transpose(1, 3).contiguous().transpose(1, 3),
        |dense| Tensor::cat(&[dense, dense], 0).slice(0, 0, 2, 1),
        // A slice of every second element: not dense.
        |dense| Tensor::stack(&[dense, &dense.zeros_like()], -1).select(-1, 0),
        // Lazily negated.
        |dense| Tensor::complex(&dense.zeros_like(), &(-dense)).conj().imag(),
    ];
    for line in [1, 1 << 20] {
        ranks_with(
            5,
            |_, builder| builder.in_place_bytes(line),
            |session| {
                let tensor = parameter(0, 0, &[2, 3, 4, 5], Kind::Float);
                let dense = patterned(session.rank(), 4, &[2, 3, 4, 5], Kind::Float);
                let gradient = layouts[session.rank()](&dense);
                assert_eq!(values(&gradient), values(&dense), "the layout must not change the content");
                set_raw_gradient(&tensor, &gradient);
                session.synchronize_gradients(0, &list(&[("p", &tensor)])).unwrap();
                assert_eq!(values(&tensor.grad()), summed(5, 4, 120), "rank {}", session.rank());
            },
        );
    }
}

#[test]
fn an_expanded_gradient_is_replaced_by_a_dense_one() {
    for line in [1, 1 << 20] {
        ranks_with(
            2,
            |_, builder| builder.in_place_bytes(line),
            |session| {
                let tensor = parameter(0, 0, &[3, 4], Kind::Float);
                let row = patterned(session.rank(), 2, &[4], Kind::Float);
                set_raw_gradient(&tensor, &row.expand([3, 4], false));
                session.synchronize_gradients(0, &list(&[("p", &tensor)])).unwrap();
                let expected: Vec<f64> = summed(2, 2, 4).repeat(3);
                assert_eq!(values(&tensor.grad()), expected);
            },
        );
    }
}

#[test]
fn channels_last_parameters_keep_their_layout() {
    ranks_with(
        3,
        |_, builder| builder.in_place_bytes(1),
        |session| {
            let dense = patterned(0, 0, &[2, 3, 4, 5], Kind::Float);
            let tensor = dense.transpose(1, 3).contiguous().transpose(1, 3).set_requires_grad(true);
            assert!(!tensor.is_contiguous());
            if session.rank() == 1 {
                set_gradient(&tensor, &patterned(1, 6, &[2, 3, 4, 5], Kind::Float));
            }
            session.synchronize_gradients(0, &list(&[("p", &tensor)])).unwrap();
            assert_eq!(tensor.grad().stride(), tensor.stride());
            assert_eq!(values(&tensor.grad()), pattern(1, 6, 120));
        },
    );
}

#[test]
fn a_tensor_under_two_names_is_reduced_once() {
    ranks(2, |session| {
        let tied = parameter(0, 0, &[6], Kind::Float);
        set_gradient(&tied, &patterned(session.rank(), 0, &[6], Kind::Float));
        let report = session.synchronize_gradients(0, &list(&[("embedding", &tied), ("head", &tied)])).unwrap();
        assert_eq!(report.active, 1);
        assert_eq!(values(&tied.grad()), summed(2, 0, 6));
    });
}

#[test]
fn gradients_that_are_pieces_of_one_storage_are_summed() {
    // What the backward of `cat` leaves behind.
    ranks_with(
        2,
        |_, builder| builder.in_place_bytes(1),
        |session| {
            let (a, b) = (parameter(0, 0, &[5], Kind::Float), parameter(0, 1, &[5], Kind::Float));
            let whole = patterned(session.rank(), 3, &[10], Kind::Float);
            set_raw_gradient(&a, &whole.narrow(0, 0, 5));
            set_raw_gradient(&b, &whole.narrow(0, 5, 5));
            session.synchronize_gradients(0, &list(&[("a", &a), ("b", &b)])).unwrap();
            let expected = summed(2, 3, 10);
            assert_eq!(values(&a.grad()), expected[..5]);
            assert_eq!(values(&b.grad()), expected[5..]);
        },
    );
}

#[test]
fn the_order_in_which_parameters_are_listed_does_not_matter() {
    ranks(2, |session| {
        let (a, b) = (parameter(0, 0, &[4], Kind::Float), parameter(0, 1, &[4], Kind::Float));
        set_gradient(&a, &patterned(session.rank(), 0, &[4], Kind::Float));
        set_gradient(&b, &patterned(session.rank(), 1, &[4], Kind::Float));
        let mut named = [("a", &a), ("b", &b)];
        if session.rank() == 1 {
            named.reverse();
        }
        session.synchronize_gradients(0, &list(&named)).unwrap();
        assert_eq!(values(&a.grad()), summed(2, 0, 4));
        assert_eq!(values(&b.grad()), summed(2, 1, 4));
    });
}

#[test]
fn fence_policies_give_the_same_bits() {
    let run = |policy| {
        ranks_with(
            3,
            move |_, builder| builder.fence_policy(policy).bucket_bytes(64).in_place_bytes(40),
            |session| {
                let tensors: Vec<Tensor> =
                    (0..9).map(|salt| parameter(0, salt, &[salt as i64 + 3], Kind::Float)).collect();
                for (salt, tensor) in tensors.iter().enumerate() {
                    // Not exactly representable: the order of the sum shows in the bits.
                    set_gradient(tensor, &(patterned(session.rank(), salt, &tensor.size(), Kind::Float) / 3.7));
                }
                let parameters = Parameters::from_named(
                    tensors.iter().enumerate().map(|(salt, tensor)| (format!("p{salt}"), tensor.shallow_clone())),
                )
                .unwrap();
                session.synchronize_gradients(0, &parameters).unwrap();
                tensors.iter().flat_map(|tensor| values(&tensor.grad())).collect::<Vec<f64>>()
            },
        )
    };
    assert_eq!(run(FencePolicy::EveryBucket), run(FencePolicy::Step));
}

#[test]
fn narrow_gradients_can_be_summed_in_float32() {
    // 256 + 0.5 is 256 in bfloat16, seven times; the sum in float32 is 259.5, which rounds to 260. In float16 the steps
    // at 2048 are 2: 2048 + 0.5 is lost seven times, 2051.5 rounds to 2052.
    for (kind, large, expected) in [(Kind::BFloat16, 256.0, 260.0), (Kind::Half, 2048.0, 2052.0)] {
        let sum = |in_float32: bool| {
            ranks_with(
                8,
                move |_, builder| if in_float32 { builder.reduction_dtype(Kind::Float) } else { builder },
                |session| {
                    let tensor = Tensor::zeros([3], (kind, Device::Cpu)).set_requires_grad(true);
                    let value = if session.rank() == 0 { large } else { 0.5 };
                    set_gradient(&tensor, &Tensor::full([3], value, (kind, Device::Cpu)));
                    session.synchronize_gradients(0, &list(&[("p", &tensor)])).unwrap();
                    assert_eq!(tensor.grad().kind(), kind);
                    values(&tensor.grad())
                },
            )
        };
        assert!(sum(true).iter().all(|values| values == &[expected; 3]), "{kind:?}");
        assert!(sum(false).iter().all(|values| values != &[expected; 3]), "{kind:?} should lose without it");
    }
}

#[test]
fn gradients_are_divided_by_the_tokens_of_all_ranks() {
    // The same examples on one rank and spread over three, one of which has none.
    let example = |salt: usize| patterned(9, salt, &[6], Kind::Double) / 7.3;
    let tokens = [3_u64, 1, 4, 1, 5];
    let shares: [&[usize]; 3] = [&[0, 3, 4], &[], &[1, 2]];
    let step = |session: &mut SyncSession, share: &[usize]| {
        let tensor = parameter(0, 0, &[6], Kind::Double);
        for &index in share {
            set_gradient(&tensor, &example(index));
        }
        let count = share.iter().map(|index| tokens[*index]).sum();
        session.synchronize_gradients_per_token(4, &list(&[("p", &tensor)]), count).unwrap();
        values(&tensor.grad())
    };
    let alone = ranks(1, |session| step(session, &[0, 1, 2, 3, 4])).remove(0);
    let spread = ranks(3, |session| step(session, shares[session.rank()]));
    for gradient in &spread {
        for (one, other) in gradient.iter().zip(&alone) {
            assert!((one - other).abs() <= 1e-15 * 40.0, "{one} is not {other}");
        }
    }
    assert!(alone.iter().any(|value| value.abs() > 0.01), "the comparison should be of something");
}

#[test]
fn buffers_survive_growth_and_parameters_that_come_and_go() {
    ranks(2, |session| {
        for (step, size) in [3_i64, 40, 5, 41].into_iter().enumerate() {
            let tensor = parameter(0, step, &[size], Kind::Float);
            set_gradient(&tensor, &patterned(session.rank(), step, &[size], Kind::Float));
            session.synchronize_gradients(step as u64, &list(&[("p", &tensor)])).unwrap();
            assert_eq!(values(&tensor.grad()), summed(2, step, size as usize));
        }
    });
}
