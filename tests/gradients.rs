//! `synchronize_gradients` on ranks that are threads.
#![allow(missing_docs)]

mod common;

use common::{WORLDS, parameter, pattern, patterned, ranks, set_gradient, values};
use sft_sync::Parameters;
use tch::Kind;

#[test]
fn gradients_are_summed_over_ranks() {
    for world in WORLDS {
        ranks(world, |session| {
            let rank = session.rank();
            let named: Vec<_> = (0..5)
                .map(|salt| (format!("p{salt}"), parameter(0, salt, &[3, salt as i64 + 1], Kind::Float)))
                .collect();
            for (salt, (_, tensor)) in named.iter().enumerate() {
                set_gradient(tensor, &patterned(rank, salt, &tensor.size(), Kind::Float));
            }
            let parameters = Parameters::from_named(named.iter().map(|(n, t)| (n.clone(), t.shallow_clone()))).unwrap();
            let report = session.synchronize_gradients(0, &parameters).unwrap();
            assert_eq!((report.active, report.globally_unused, report.buckets), (5, 0, 1));
            for (salt, (name, tensor)) in named.iter().enumerate() {
                let expected: Vec<f64> = (0..tensor.numel())
                    .map(|index| (0..world).map(|rank| pattern(rank, salt, tensor.numel())[index]).sum())
                    .collect();
                assert_eq!(values(&tensor.grad()), expected, "{name} at {world} ranks");
            }
            session.assert_rank_equal(parameters.values(), "end").unwrap();
        });
    }
}
