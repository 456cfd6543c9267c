//! `broadcast_trainable_parameters` on ranks that are threads (invariant I3).
#![allow(missing_docs)]

mod common;

use common::{WORLDS, parameter, patterned, ranks_with, values};
use sft_sync::{Parameters, Transport};
use tch::{Device, Kind, Tensor, nn};

#[test]
fn every_rank_gets_the_parameters_of_rank_0() {
    let kinds = [
        Kind::Float,
        Kind::Double,
        Kind::Half,
        Kind::BFloat16,
        Kind::Int64,
        Kind::Int16,
        Kind::Uint8,
        Kind::Bool,
        Kind::ComplexFloat,
    ];
    for world in WORLDS {
        for transport in [Transport::InPlace, Transport::Flat] {
            ranks_with(
                world,
                |_, builder| builder.bucket_bytes(300).in_place_bytes(64).transport(transport),
                |session| {
                    let make = |rank: usize| -> Vec<Tensor> {
                        kinds
                            .iter()
                            .enumerate()
                            .flat_map(|(salt, kind)| {
                                [1, 7, 61, 0].map(|size| patterned(rank, salt, &[size], Kind::Double).to_kind(*kind))
                            })
                            .collect()
                    };
                    let tensors = make(session.rank());
                    let addresses: Vec<_> = tensors.iter().map(Tensor::data_ptr).collect();
                    let parameters = Parameters::from_named(
                        tensors
                            .iter()
                            .enumerate()
                            .map(|(index, tensor)| (format!("{index:03}"), tensor.shallow_clone())),
                    )
                    .unwrap();
                    let report = session.broadcast_trainable_parameters(&parameters).unwrap();
                    assert!(report.buckets > kinds.len());
                    for (tensor, expected) in tensors.iter().zip(make(0)) {
                        assert!(tensor.equal(&expected), "{:?} at {world} ranks", tensor.kind());
                    }
                    assert_eq!(addresses, tensors.iter().map(Tensor::data_ptr).collect::<Vec<_>>());
                    let _ = session.assert_rank_equal(parameters.values(), "after").unwrap();
                },
            );
        }
    }
}

#[test]
fn layouts_may_differ_and_stay() {
    for line in [1, 1 << 20] {
        ranks_with(
            3,
            |_, builder| builder.in_place_bytes(line),
            |session| {
                let dense = patterned(session.rank(), 0, &[4, 6], Kind::Float);
                let tensor = match session.rank() {
                    0 => dense.transpose(0, 1).contiguous().transpose(0, 1),
                    1 => dense,
                    _ => Tensor::stack(&[&dense, &dense], -1).select(-1, 1),
                };
                let strides = tensor.stride();
                let parameters = Parameters::from_named([("p", tensor.shallow_clone())]).unwrap();
                session.broadcast_trainable_parameters(&parameters).unwrap();
                assert_eq!(values(&tensor), values(&patterned(0, 0, &[4, 6], Kind::Float)));
                assert_eq!(tensor.stride(), strides);
            },
        );
    }
}

#[test]
fn tied_parameters_travel_once_and_leaves_stay_leaves() {
    ranks_with(
        2,
        |_, builder| builder,
        |session| {
            let tied = parameter(session.rank(), 3, &[5], Kind::Float);
            let parameters =
                Parameters::from_named([("in", tied.shallow_clone()), ("out", tied.shallow_clone())]).unwrap();
            let report = session.broadcast_trainable_parameters(&parameters).unwrap();
            assert_eq!((report.active, report.bytes), (1, 20));
            assert_eq!(values(&tied), values(&parameter(0, 3, &[5], Kind::Float)));
            assert!(tied.requires_grad() && tied.is_leaf());
        },
    );
}

#[test]
fn autograd_is_told_that_parameters_were_written() {
    ranks_with(
        2,
        |_, builder| builder,
        |session| {
            let tensor = parameter(session.rank(), 0, &[4], Kind::Float);
            let loss = (&tensor * &tensor).sum(Kind::Float);
            let parameters = Parameters::from_named([("p", tensor.shallow_clone())]).unwrap();
            session.broadcast_trainable_parameters(&parameters).unwrap();
            // The graph saved the old values, which are gone.
            assert!(loss.f_backward().is_err());
        },
    );
}

#[test]
fn parameters_follow_a_var_store_through_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let make = || {
        let store = nn::VarStore::new(Device::Cpu);
        let _ = nn::linear(store.root() / "layer", 3, 2, nn::LinearConfig::default());
        store
    };
    make().save(&path).unwrap();
    ranks_with(
        2,
        |_, builder| builder,
        |session| {
            let mut store = make();
            let parameters = Parameters::trainable(&store).unwrap();
            assert_eq!(parameters.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["layer.bias", "layer.weight"]);
            // Swaps the storage under the handles that `parameters` holds.
            store.load(&path).unwrap();
            let _ = session.assert_rank_equal(parameters.values(), "loaded").unwrap();
            store.freeze();
            assert_eq!((parameters.frozen().count(), parameters.values().count()), (2, 2));
            assert!(Parameters::trainable(&store).unwrap().is_empty());
        },
    );
}
