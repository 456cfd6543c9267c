//! [`SyncSession`]: the order of things. What each operation does with tensors is in [`reduce`] and
//! [`broadcast`](self::broadcast); here is what all of them share: numbered calls, one verdict, poisoning.

#![forbid(unsafe_code)]

mod broadcast;
mod check;
mod commit;
mod decide;
mod locate;
mod options;
#[cfg(feature = "raw-engine")]
mod raw;
mod reduce;
mod survey;
mod verdict;

use std::collections::HashMap;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tch::Tensor;

pub use self::commit::Committed;
pub use self::decide::Summable;
pub(crate) use self::options::Options;
pub use self::options::{FencePolicy, SessionBuilder, Transport};
#[cfg(feature = "raw-engine")]
pub use self::raw::{Allocations, count_allocations};
use crate::collective::agreement::{Field, Frame, Merged, REFUSED};
use crate::collective::deadline::Deadline;
use crate::collective::{Communicator, ConnectOptions, connect};
use crate::consistency::digest::Hasher;
use crate::error::{EngineError, Interruption, Operation, Position, Result, Stage, SyncError, TensorError};
use crate::fault::{Faults, Point};
use crate::parameters::{Schema, first_u64};
use crate::tensor::DType;

static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(1);

/// A rank among connected ranks.
///
/// Its operations are **collective**: every rank calls them, in the same order. A rank that calls another one, or the
/// same with another step, makes all of them return the same error, before anything has moved. Each operation has one
/// deadline and returns by it, whatever the peers do.
///
/// Dropping a session closes its connections; peers that still depend on it are told within milliseconds.
pub struct SyncSession {
    communicator: Communicator,
    options: Options,
    options_digest: [u8; 16],
    local_rank: Option<usize>,
    /// Tells this session's tokens from those of other sessions of the process.
    identity: u64,
    calls: u64,
    /// The call of the latest successful check.
    latest_check: Option<u64>,
    /// The step of the latest successful synchronization of gradients.
    latest_step: Option<u64>,
    /// The first failure; everything afterwards is refused with it.
    poison: Option<Arc<SyncError>>,
    schema: Schema,
    plan: reduce::Plan,
    /// Flat buffers that small tensors travel in, kept from step to step.
    flats: HashMap<DType, Tensor>,
    hasher: Option<Hasher>,
    /// Rank 0's, the same on all ranks: the keys of fingerprints are derived from it.
    secret: [u8; 32],
    faults: Faults,
}

impl std::fmt::Debug for SyncSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SyncSession")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("calls", &self.calls)
            .field("poison", &self.poison)
            .finish_non_exhaustive()
    }
}

/// What an operation on gradients or parameters did on this rank.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SyncReport {
    /// Buckets that moved.
    pub buckets: usize,
    /// Bytes of the tensors that moved, each counted once.
    pub bytes: usize,
    /// Parameters that some rank has a gradient for.
    pub active: usize,
    /// Parameters that no rank has a gradient for: their gradient is undefined everywhere.
    pub globally_unused: usize,
    /// Parameters that only other ranks have a gradient for.
    pub locally_absent: usize,
    /// Time in the whole call.
    pub total: Duration,
    /// Time in agreements: waiting for the slowest rank, mostly.
    pub fence: Duration,
    /// Time packing small tensors.
    pub pack: Duration,
    /// Time in collectives that move tensors.
    pub reduce: Duration,
    /// Time unpacking them.
    pub unpack: Duration,
}

/// A call under way.
pub(crate) struct Call {
    at: Position,
    deadline: Deadline,
    parameters_unspecified: bool,
    /// What the frame's content field stands for, for the report of a difference.
    content: &'static str,
}

/// Why a call's body ended early.
pub(crate) enum Failure {
    /// All ranks have come to this error together; the session goes on.
    Verdict(SyncError),
    /// Something failed on the way; the session is given up.
    Engine(Stage, EngineError),
}

/// Names the stage that an engine error came from.
pub(crate) trait During<T> {
    fn during(self, stage: Stage) -> std::result::Result<T, Failure>;
}

impl<T, E: Into<EngineError>> During<T> for std::result::Result<T, E> {
    fn during(self, stage: Stage) -> std::result::Result<T, Failure> {
        self.map_err(|error| Failure::Engine(stage, error.into()))
    }
}

type Outcome<T> = std::result::Result<T, Failure>;

impl SyncSession {
    /// A builder with defaults and no rendezvous.
    pub fn builder() -> SessionBuilder {
        SessionBuilder::new()
    }

    /// A builder with what a launcher has set in the environment; see [`from_env`](Self::from_env).
    ///
    /// # Errors
    ///
    /// [`SyncError::Configuration`] for a variable that is missing or makes no sense, by name.
    pub fn builder_from_env() -> Result<SessionBuilder> {
        SessionBuilder::new().with_environment(|name| std::env::var(name).ok())
    }

    /// Connects as torchrun's variables say: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, and if set
    /// `LOCAL_RANK`, `TORCHELASTIC_USE_AGENT_STORE`, `TORCHELASTIC_RESTART_COUNT` and `GLOO_SOCKET_IFNAME`. Collective.
    ///
    /// # Errors
    ///
    /// As [`SessionBuilder::build`].
    pub fn from_env() -> Result<Self> {
        Self::builder_from_env()?.build()
    }

    fn connect(connect_options: &ConnectOptions, options: Options, local_rank: Option<usize>) -> Result<Self> {
        let span = tracing::info_span!("connect", rank = connect_options.rank, world_size = connect_options.world_size);
        let _entered = span.enter();
        let start = Instant::now();
        let communicator = connect(connect_options).map_err(|error| SyncError::Connect(Box::new(error)))?;
        let mut digest = blake3::Hasher::new();
        for (name, value) in options.shared() {
            digest.update(format!("{name}={value}\n").as_bytes());
        }
        let mut options_digest = [0; 16];
        options_digest.copy_from_slice(&digest.finalize().as_bytes()[..16]);
        let mut session = Self {
            communicator,
            options,
            options_digest,
            local_rank,
            identity: NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed),
            calls: 0,
            latest_check: None,
            latest_step: None,
            poison: None,
            schema: Schema::default(),
            plan: reduce::Plan::default(),
            flats: HashMap::new(),
            hasher: None,
            secret: [0; 32],
            faults: connect_options.faults.clone(),
        };
        // Tells builds and options apart before the first real call.
        let left = connect_options.limit.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
        session.run_within(left, Operation::Connect, None, None, |session, call| {
            session.agree(call, session.frame(call), None)?;
            session.share_secret(call)
        })?;
        tracing::info!(seconds = start.elapsed().as_secs_f64(), "connected");
        Ok(session)
    }

    /// Gives rank 0's secret to all ranks. Collective.
    fn share_secret(&mut self, call: &Call) -> Outcome<()> {
        if self.rank() == 0 {
            let problem = |error| EngineError::other(format!("no random bytes from the operating system: {error}"));
            getrandom::fill(&mut self.secret).map_err(problem).during(Stage::Local)?;
        }
        // The others bring zeros.
        self.communicator.or(&mut self.secret, &call.deadline).during(Stage::Data)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// This rank's number on its host, where the launcher or the builder has said so.
    pub fn local_rank(&self) -> Option<usize> {
        self.local_rank
    }

    /// The failure that ended this session, if one has.
    pub fn poison(&self) -> Option<&SyncError> {
        self.poison.as_deref()
    }

    /// Ends the session in order: returns when every rank has called it, so that none takes the others by surprise.
    /// Collective.
    ///
    /// # Errors
    ///
    /// [`SyncError::Desynchronized`] if another rank made another call; [`SyncError::Interrupted`] if one is gone;
    /// [`SyncError::Poisoned`] after a failure. The session has ended in any case.
    pub fn shutdown(mut self) -> Result<()> {
        self.run(Operation::Shutdown, None, None, |session, call| {
            session.agree(call, session.frame(call), None).map(drop)
        })
    }

    /// Carries out one operation: numbers it, and gives the session up if it fails on the way.
    fn run<T>(
        &mut self,
        operation: Operation,
        step: Option<u64>,
        phase: Option<&str>,
        body: impl FnOnce(&mut Self, &mut Call) -> Outcome<T>,
    ) -> Result<T> {
        self.run_within(self.options.operation_timeout, operation, step, phase, body)
    }

    fn run_within<T>(
        &mut self,
        limit: Duration,
        operation: Operation,
        step: Option<u64>,
        phase: Option<&str>,
        body: impl FnOnce(&mut Self, &mut Call) -> Outcome<T>,
    ) -> Result<T> {
        if let Some(first) = &self.poison {
            return Err(SyncError::Poisoned { first: Arc::clone(first) });
        }
        self.calls += 1;
        let at = Position { operation, step, phase: phase.map(String::from), call: self.calls, bucket: None };
        let mut call = Call { at, deadline: Deadline::after(limit), parameters_unspecified: false, content: "" };
        let span = tracing::info_span!("operation", name = operation.name(), step, call = call.at.call);
        let _entered = span.enter();
        // A panic goes on, once the peers have been told: they should not wait for a rank that does not come.
        let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
            self.faults.reach(Point::CallEntered).during(Stage::Local)?;
            let value = body(self, &mut call)?;
            self.faults.reach(Point::CallLeaving).during(Stage::Local)?;
            Ok(value)
        }))
        .unwrap_or_else(|panicked| {
            // Kept as the poison; nobody is there to take the error.
            let _ = self.interrupt(&call, Stage::Local, EngineError::other("the call panicked"));
            panic::resume_unwind(panicked)
        });
        if outcome.is_ok() {
            match operation {
                Operation::AssertRankEqual => self.latest_check = Some(call.at.call),
                Operation::SynchronizeGradients | Operation::SynchronizeGradientsPerToken => self.latest_step = step,
                _ => {}
            }
        }
        outcome.map_err(|failure| match failure {
            Failure::Verdict(error) => {
                tracing::warn!(%error, "refused by agreement");
                error
            }
            Failure::Engine(stage, cause) => self.interrupt(&call, stage, cause),
        })
    }

    /// Gives the session up: closes both groups at once, waits until nothing is in flight, learns who is missing.
    fn interrupt(&mut self, call: &Call, stage: Stage, cause: EngineError) -> SyncError {
        let waited = call.deadline.waited();
        self.communicator.abort();
        let learned = self.communicator.post_mortem(&call.at, self.options.grace);
        let interruption = Interruption {
            at: call.at.clone(),
            stage,
            waited,
            limit: call.deadline.limit(),
            missing: learned.missing,
            reported: learned.reported,
            store_lost: learned.store_lost,
            parameters_unspecified: call.parameters_unspecified,
            cause,
        };
        tracing::error!(%interruption, "the session is given up");
        self.poison = Some(Arc::new(SyncError::Interrupted(Box::new(interruption.clone()))));
        SyncError::Interrupted(Box::new(interruption))
    }

    /// The frame of a call, with what every operation fills in.
    fn frame(&self, call: &Call) -> Frame {
        let phase = call.at.phase.as_ref().map_or(0, |phase| first_u64(blake3::hash(phase.as_bytes())));
        Frame::new(call.at.operation, call.at.call)
            .step(call.at.step)
            .phase(phase)
            .bucket(call.at.bucket.map_or(0, |(index, _)| index as u64 + 1))
            .options(&self.options_digest)
    }

    /// Comes to one verdict with the other ranks. With `refusal`, or when anything but the root digest differs between
    /// ranks, that verdict is the same error everywhere.
    fn agree(&mut self, call: &Call, frame: Frame, refusal: Option<&TensorError>) -> Outcome<Merged> {
        let merged =
            self.communicator.agree(frame.flag(REFUSED, refusal.is_some()), &call.deadline).during(Stage::Agreement)?;
        if merged.unanimous_but_for(Field::Root) && !merged.any(REFUSED) {
            return Ok(merged);
        }
        Err(self.settle(call, refusal))
    }
}
