//! What the tests share: ranks as threads of one process, and data that hides nothing.
#![allow(dead_code, unreachable_pub, missing_docs)] // Each test program uses its part.
#![allow(clippy::cast_precision_loss)] // Of numbers below 13.

use std::thread;
use std::time::Duration;

use sft_sync::{InProcess, Rendezvous, SessionBuilder, SyncSession};
use tch::{Kind, Tensor};

/// World sizes that cover one rank, an even and an odd number, a power of two, and a prime with an uneven last round.
pub const WORLDS: [usize; 5] = [1, 2, 3, 4, 7];

/// Runs `body` as every rank of `world`, each on a thread, and returns what they return, in the order of ranks.
#[track_caller]
pub fn ranks<T: Send>(world: usize, body: impl Fn(&mut SyncSession) -> T + Sync) -> Vec<T> {
    ranks_with(world, |_, builder| builder, body)
}

/// As [`ranks`], with settings of their own.
#[track_caller]
pub fn ranks_with<T: Send>(
    world: usize,
    settings: impl Fn(usize, SessionBuilder) -> SessionBuilder + Sync,
    body: impl Fn(&mut SyncSession) -> T + Sync,
) -> Vec<T> {
    build_ranks(world, settings, |session| body(&mut session.expect("the ranks should connect")))
}

/// As [`ranks_with`], for sessions that may fail to connect.
#[track_caller]
pub fn build_ranks<T: Send>(
    world: usize,
    settings: impl Fn(usize, SessionBuilder) -> SessionBuilder + Sync,
    body: impl Fn(sft_sync::Result<SyncSession>) -> T + Sync,
) -> Vec<T> {
    let place = InProcess::new().unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let builder = SyncSession::builder()
                    .rendezvous(Rendezvous::InProcess(place.clone()))
                    .rank(rank)
                    .world_size(world)
                    .threads(1)
                    .connect_timeout(Duration::from_secs(60))
                    .operation_timeout(Duration::from_secs(60));
                let (settings, body) = (&settings, &body);
                scope.spawn(move || body(settings(rank, builder).build()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank should panic")).collect()
    })
}

/// Numbers that depend on the rank and the index, with a prime period, exactly representable in every float type and
/// small enough that sums over ranks are exact too: a swapped offset or rank shows.
pub fn pattern(rank: usize, salt: usize, numel: usize) -> Vec<f64> {
    (0..numel).map(|index| ((index * 7 + rank * 3 + salt * 5) % 13) as f64 - 6.0).collect()
}

pub fn patterned(rank: usize, salt: usize, shape: &[i64], kind: Kind) -> Tensor {
    let numel = usize::try_from(shape.iter().product::<i64>()).unwrap();
    Tensor::from_slice(&pattern(rank, salt, numel)).reshape(shape).to_kind(kind)
}

/// A leaf that requires a gradient.
pub fn parameter(rank: usize, salt: usize, shape: &[i64], kind: Kind) -> Tensor {
    patterned(rank, salt, shape, kind).set_requires_grad(true)
}

/// Gives a leaf exactly this gradient, through autograd: the loss is the sum of the products.
pub fn set_gradient(parameter: &Tensor, gradient: &Tensor) {
    (parameter * gradient).sum(Kind::Double).backward();
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).contiguous().reshape([-1])).unwrap()
}
