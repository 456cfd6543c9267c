//! Data-parallel synchronization for supervised fine-tuning (SFT) on [`tch`].
//!
//! Ranks step on the same gradients or not at all; a replica that has drifted is found, named and never committed;
//! nothing hangs. The engine is PyTorch's own `c10d` with Gloo, inside the libtorch that `tch` links already.
//!
//! # A training loop
//!
//! Two ranks, here as threads of one process; under `torchrun` each process calls [`SyncSession::from_env`] instead of
//! the builder, and the rest is the same.
//!
//! ```
//! use sft_sync::{InProcess, Parameters, Rendezvous, SyncSession};
//! use tch::{Device, Kind, Tensor, nn, nn::Module, nn::OptimizerConfig};
//!
//! fn train(mut session: SyncSession) -> Result<(), Box<dyn std::error::Error>> {
//!     let store = nn::VarStore::new(Device::Cpu);
//!     let model = nn::linear(store.root() / "model", 4, 1, Default::default());
//!     let mut optimizer = nn::AdamW::default().build(&store, 1e-2)?;
//!     let parameters = Parameters::trainable(&store)?;
//!
//!     session.broadcast_trainable_parameters(&parameters)?;
//!     for step in 0..3 {
//!         let rank = session.rank() as f64;
//!         let inputs = Tensor::ones([2, 4], (Kind::Float, Device::Cpu)) * (rank + 1.0);
//!         let losses = (model.forward(&inputs) - rank).square();
//!         // Normalized by the count over all ranks: ranks may hold different numbers of tokens.
//!         let tokens = session.sum(step, losses.numel())?;
//!         optimizer.zero_grad();
//!         (losses.sum(Kind::Float) / tokens as f64).backward();
//!         session.synchronize_gradients(step, &parameters)?;
//!         optimizer.step();
//!     }
//!     let verified = session.assert_rank_equal(Parameters::all(&store)?.values(), "checkpoint")?;
//!     println!("all ranks hold {}", verified.root());
//!     session.shutdown()?;
//!     Ok(())
//! }
//!
//! let place = InProcess::new()?;
//! std::thread::scope(|scope| {
//!     for rank in 0..2 {
//!         let builder = SyncSession::builder()
//!             .rendezvous(Rendezvous::InProcess(place.clone()))
//!             .rank(rank)
//!             .world_size(2);
//!         scope.spawn(move || train(builder.build().unwrap()).unwrap());
//!     }
//! });
//! # Ok::<(), sft_sync::SyncError>(())
//! ```
//!
//! # Collective calls
//!
//! Methods of [`SyncSession`] that take `&mut self` are **collective**: every rank calls them, in the same order. What a
//! rank does differently (another method, another `step`, other parameters, other options) or cannot do (a sparse
//! gradient) becomes the same error on every rank, in the same call, before anything has moved. Everything else is local.
//!
//! # What holds
//!
//! | | |
//! |---|---|
//! | Buckets | In name order, closed when the next tensor would pass the limit or differs in dtype or device. |
//! | Fence | Before a bucket moves, all ranks meet in an agreement ([`FencePolicy`]). |
//! | Used mask | A gradient present on any rank is present on all afterwards, with absent ones as zeros. One that no rank has stays undefined, so that `AdamW` advances nothing for it. |
//! | Sum | Gradients are summed, not averaged: normalize by the global token count, before ([`sum`](SyncSession::sum)) or in the call ([`synchronize_gradients_per_token`](SyncSession::synchronize_gradients_per_token)). |
//! | One verdict | Among live ranks a disagreement is one error on all of them. When a process or a link fails, survivors may see it one call apart; none completes the call after. |
//! | Bounded | Each call has one deadline and returns by it, whatever peers do. After a failure the grace period comes on top. |
//! | Poison | After a failure the session refuses everything, with the first cause. |
//! | No wrong step | Whatever error `synchronize_gradients` returns, no listed parameter has a gradient afterwards: stepping all the same changes nothing. |
//! | Checkpoints | A committed checkpoint is, bit for bit, what all ranks were checked to hold; until it is committed the one before stands. |
//! | Aliases | A tensor under two names is reduced once; overlapping storage is refused. Layouts may differ between ranks. |
//!
//! # Layers
//!
//! Imports run one way, downwards.
//!
//! | module | what it is |
//! |---|---|
//! | `session` | the order of things: numbered calls, one verdict, poisoning; one file for each operation |
//! | `consistency` | digests, their comparison, the proof of equality; manifests, and checkpoints in the making |
//! | `parameters` | named tensors in name order, aliases, the schema |
//! | `bucket` | planning: pure, ignorant of collectives |
//! | `collective` | rendezvous, the agreement, deadlines, store calls that cannot hold their caller |
//! | `collective::c10d` | the C++ fence: all `unsafe` code and all C++ |
//! | `error` | what can go wrong, as data |
//!
//! # Features
//!
//! - `doc-only`: documentation without libtorch. Nothing links.
//! - `fault-injection`: test-only points at which a rank can be made to fail. Never turn it on in a program.
//! - `raw-engine`: test-only access to the engine without this crate around it, for benches. Not covered by semantic
//!   versioning.

#![doc(test(attr(deny(warnings))))]

mod bucket;
mod collective;
mod consistency;
mod error;
#[cfg(feature = "fault-injection")]
pub mod fault;
#[cfg(not(feature = "fault-injection"))]
mod fault;
mod parameters;
mod session;
mod tensor;

pub use crate::collective::{InProcess, Rendezvous};
pub use crate::consistency::{
    CheckedTensor, Digest, DigestAlgorithm, Manifest, SavedTensor, Verified, manifest_path, tensor_digest,
    verify_checkpoint,
};
pub use crate::error::{
    CheckpointError, CheckpointProblem, CommitProblem, CommitRefusal, ConnectError, ConnectProblem, ConnectStage,
    Desynchronization, DesynchronizedField, Divergence, EngineError, EngineErrorKind, FirstDifference, Interruption,
    Operation, Position, Refusal, Result, SchemaDifference, Side, Stage, SyncError, TensorDivergence, TensorError,
    TensorProblem,
};
pub use crate::parameters::{NamedTensor, Parameters, Scalar};
#[cfg(feature = "raw-engine")]
#[doc(hidden)]
pub use crate::session::{Allocations, count_allocations};
pub use crate::session::{Committed, FencePolicy, SessionBuilder, Summable, SyncReport, SyncSession, Transport};
