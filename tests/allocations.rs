//! After the first step a step allocates no torch memory, and large gradients are never copied. Alone in its program,
//! since allocations are counted for the whole process.
#![cfg(feature = "raw-engine")]
#![allow(missing_docs)]

mod common;

use common::{parameter, patterned, ranks, set_gradient};
use sft_sync::{Parameters, count_allocations};
use tch::Kind;

#[test]
fn steps_after_the_first_allocate_nothing() {
    ranks(2, |session| {
        // Above the line, below it, and of another dtype.
        let tensors = [
            parameter(0, 0, &[600, 600], Kind::Float),
            parameter(0, 1, &[61], Kind::Float),
            parameter(0, 2, &[3, 5], Kind::Float),
            parameter(0, 3, &[17], Kind::Double),
        ];
        for (salt, tensor) in tensors.iter().enumerate() {
            set_gradient(tensor, &patterned(session.rank(), salt, &tensor.size(), tensor.kind()));
        }
        let named = tensors.iter().enumerate().map(|(index, tensor)| (format!("p{index}"), tensor.shallow_clone()));
        let parameters = Parameters::from_named(named).unwrap();
        session.synchronize_gradients(0, &parameters).unwrap();
        // Both ranks are past the first step before either counts, and past the last before either does anything else.
        session.raw_barrier().unwrap();
        let counted = count_allocations();
        for step in 1..6 {
            session.synchronize_gradients(step, &parameters).unwrap();
        }
        let counted = counted();
        session.raw_agreement().unwrap();
        assert_eq!(counted.count, 0, "{counted:?}");
        // The counter does count.
        let counted = count_allocations();
        let made = patterned(0, 0, &[1000], Kind::Float);
        assert!(counted().count > 0 && counted().peak_bytes >= 4000);
        drop(made);
    });
}
