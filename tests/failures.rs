//! A lost rank, on ranks that are threads: bounded, typed, and nobody steps (invariants I9 to I11). What killed, stopped
//! and cut-off processes do is in the chaos suite.
#![allow(missing_docs)]

mod common;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{build_ranks, parameter, patterned, ranks, ranks_with, set_gradient};
use sft_sync::{EngineErrorKind, Operation, Parameters, Result, Stage, SyncError, SyncSession};
use tch::{Kind, Tensor};

fn one(rank: usize) -> (Tensor, Parameters) {
    let tensor = parameter(0, 0, &[5], Kind::Float);
    set_gradient(&tensor, &patterned(rank, 0, &[5], Kind::Float));
    let parameters = Parameters::from_named([("p", tensor.shallow_clone())]).unwrap();
    (tensor, parameters)
}

#[track_caller]
fn assert_interrupted(error: &SyncError, missing: &[usize]) {
    assert!(error.is_interrupted() && error.needs_rebuild() && !error.is_disagreement(), "{error}");
    let SyncError::Interrupted(interruption) = error else { panic!("{error:?}") };
    assert_eq!(interruption.missing, missing, "{error}");
    assert!(!interruption.store_lost, "{error}");
}

/// What every survivor sees when `call` meets a rank that has gone.
fn survivors(world: usize, call: impl Fn(&mut SyncSession, &Parameters) -> Result<()> + Sync) {
    let gone = world - 1;
    build_ranks(
        world,
        |_, builder| builder.grace(Duration::from_millis(200)),
        |session| {
            let mut session = session.unwrap();
            session.sum(0, 1_u64).unwrap();
            if session.rank() == gone {
                return;
            }
            let (tensor, parameters) = one(session.rank());
            let start = Instant::now();
            let error = call(&mut session, &parameters).unwrap_err();
            // The deadline is a minute: a peer that has gone is seen at once, not by waiting.
            assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
            assert_interrupted(&error, &[gone]);

            // Whatever is asked for now is refused, with the first cause, and gradients are withdrawn.
            set_gradient(&tensor, &patterned(0, 0, &[5], Kind::Float));
            let refused = session.synchronize_gradients(1, &parameters).unwrap_err();
            assert!(
                matches!(&refused, SyncError::Poisoned { first } if first.to_string() == error.to_string()),
                "{refused}"
            );
            assert!(refused.needs_rebuild() && refused.is_interrupted());
            assert!(!tensor.grad().defined());
            assert!(matches!(session.poison(), Some(SyncError::Interrupted(_))));
            let start = Instant::now();
            drop(session);
            assert!(start.elapsed() < Duration::from_secs(2), "dropping took {:?}", start.elapsed());
        },
    );
}

#[test]
fn a_rank_that_has_gone_is_named_by_every_operation() {
    for world in [2, 3, 4] {
        survivors(world, |session, parameters| session.synchronize_gradients(0, parameters).map(drop));
        survivors(world, |session, parameters| session.synchronize_gradients_per_token(0, parameters, 3).map(drop));
        survivors(world, |session, parameters| session.broadcast_trainable_parameters(parameters).map(drop));
        survivors(world, |session, parameters| session.assert_rank_equal(parameters.values(), "end").map(drop));
        survivors(world, |session, _| session.all_agree(1, true).map(drop));
        survivors(world, |session, _| session.sum(1, 1_u64).map(drop));
    }
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_until_the_deadline() {
    let limit = Duration::from_millis(300);
    let done = Barrier::new(3);
    ranks_with(
        3,
        |_, builder| builder.operation_timeout(limit).grace(Duration::from_millis(100)),
        |session| {
            if session.rank() != 1 {
                let (tensor, parameters) = one(session.rank());
                let start = Instant::now();
                let error = session.synchronize_gradients(7, &parameters).unwrap_err();
                let took = start.elapsed();
                assert!(took >= Duration::from_millis(50) && took < limit + Duration::from_secs(2), "took {took:?}");
                assert_interrupted(&error, &[1]);
                assert!(!tensor.grad().defined());
                let SyncError::Interrupted(interruption) = error else { unreachable!() };
                assert_eq!(interruption.stage, Stage::Agreement);
                assert_eq!(
                    (interruption.at.operation, interruption.at.step),
                    (Operation::SynchronizeGradients, Some(7))
                );
                assert_eq!(interruption.limit, limit);
                assert!(matches!(
                    interruption.cause.kind(),
                    EngineErrorKind::Timeout | EngineErrorKind::ConnectionLost
                ));
            }
            // Rank 1 stays connected, and makes its call too late.
            done.wait();
            if session.rank() == 1 {
                assert!(session.all_agree(7, true).unwrap_err().is_interrupted());
            }
        },
    );
}

#[test]
fn a_rank_that_panics_is_gone() {
    let results = ranks(3, |session| {
        if session.rank() == 0 {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // A caller's tensors are read lazily, inside the call.
                let tensors = std::iter::from_fn(|| -> Option<(String, Tensor)> { panic!("on purpose") });
                session.assert_rank_equal(tensors, "end").map(drop)
            }));
            assert!(panicked.is_err());
            return None;
        }
        session.assert_rank_equal(Vec::<(String, Tensor)>::new(), "end").map(drop).err()
    });
    for error in results.into_iter().flatten() {
        assert_interrupted(&error, &[0]);
    }
}

#[test]
fn a_failed_session_is_replaced_in_the_same_process() {
    let place = sft_sync::InProcess::new().unwrap();
    let build = |rank: usize, attempt: u64| {
        SyncSession::builder()
            .rendezvous(sft_sync::Rendezvous::InProcess(place.clone()))
            .rank(rank)
            .world_size(2)
            .attempt(attempt)
            .grace(Duration::from_millis(100))
            .build()
            .unwrap()
    };
    std::thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let mut session = build(rank, 0);
                if rank == 1 {
                    drop(session);
                } else {
                    assert!(session.sum(0, 1_u64).unwrap_err().is_interrupted());
                }
                let mut session = build(rank, 1);
                assert_eq!(session.sum(0, 1_u64).unwrap(), 2);
                session.shutdown().unwrap();
            });
        }
    });
}

#[test]
fn shutdown_waits_for_all_and_tells_who_does_something_else() {
    for world in common::WORLDS {
        build_ranks(world, |_, builder| builder, |session| session.unwrap().shutdown().unwrap());
    }
    let results = build_ranks(
        2,
        |_, builder| builder,
        |session| {
            let mut session = session.unwrap();
            if session.rank() == 0 { session.shutdown().unwrap_err() } else { session.sum(4, 1_u64).unwrap_err() }
        },
    );
    for error in results {
        let text = error.to_string();
        assert!(text.contains("rank 0: shutdown") && text.contains("rank 1: sum (step 4"), "{text}");
    }
}
