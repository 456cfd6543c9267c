//! The training loop of a rank: what every process runs, and, undisturbed and as threads, the reference.

use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sft_sync::{FencePolicy, Operation, Parameters, SessionBuilder, SyncError, SyncSession, Transport};

use crate::model::{self, Model};
use crate::record::{Log, Moment, Outcome, Record, now_ms};
use crate::scenario::{Caller, Kind, Scenario, Shape, asks, checks};

/// Longer than a closed connection may take to be noticed.
const LINGER: Duration = Duration::from_secs(3);

/// The loop is over before its last step.
pub(crate) struct Over;

type Flow<T> = Result<T, Over>;

pub(crate) struct Trainer<'a> {
    scenario: &'a Scenario,
    rank: usize,
    /// The fault, if it is this rank's.
    fault: Option<Kind>,
    /// Steps whose gradients are thrown away instead of stepped on.
    without: BTreeSet<u64>,
    log: Log,
    /// The number of the call under way, for whoever watches from inside it.
    calls: Arc<AtomicU64>,
    session: Option<SyncSession>,
    model: Model,
}

/// What the shape says, on a builder.
pub(crate) fn shaped(builder: SessionBuilder, shape: Shape) -> SessionBuilder {
    builder
        .threads(1)
        .transport(if shape.flat { Transport::Flat } else { Transport::InPlace })
        .fence_policy(if shape.fence_each_bucket { FencePolicy::EveryBucket } else { FencePolicy::Step })
        .bucket_bytes(if shape.small_buckets { 1024 } else { 32 << 20 })
        .in_place_bytes(if shape.small_buckets { 512 } else { 1 << 20 })
}

impl<'a> Trainer<'a> {
    pub(crate) fn new(scenario: &'a Scenario, rank: usize, log: Log) -> Self {
        Self {
            scenario,
            rank,
            fault: (rank == scenario.victim).then_some(scenario.kind),
            without: BTreeSet::new(),
            log,
            calls: Arc::default(),
            session: None,
            model: Model::new(rank, scenario.shape),
        }
    }

    /// A run without the fault, which leaves the parameters alone in some steps.
    pub(crate) fn undisturbed(scenario: &'a Scenario, rank: usize, log: Log, without: BTreeSet<u64>) -> Self {
        Self { fault: None, without, ..Self::new(scenario, rank, log) }
    }

    pub(crate) fn calls(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.calls)
    }

    /// From connecting to shutting down.
    pub(crate) fn run(&mut self, builder: SessionBuilder) {
        let _: Flow<()> = self.connect(builder).and_then(|()| self.train());
        if self.fault == Some(Kind::EngineFailure) && self.scenario.caller == Caller::Ignores {
            // The others must have been told by the failure, not by the end of this process.
            thread::sleep(LINGER);
        }
        let start = Instant::now();
        drop(self.session.take());
        self.log.write(&Record::Dropped { ms: millis(start.elapsed()) });
        self.log.write(&Record::Done { at_ms: now_ms() });
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    fn connect(&mut self, builder: SessionBuilder) -> Flow<()> {
        let session = self.observe(Operation::Connect, None, |_| builder.build())?;
        self.session = session;
        // Without a session there is nothing to ignore errors of.
        if self.session.is_some() { Ok(()) } else { Err(Over) }
    }

    fn train(&mut self) -> Flow<()> {
        let parameters = self.model.parameters();
        self.call(Operation::BroadcastParameters, None, |session| session.broadcast_trainable_parameters(&parameters))?;
        self.hold(Moment::Start);
        self.check(None)?;
        for step in 0..self.scenario.steps {
            self.step(step)?;
        }
        self.shutdown()
    }

    fn step(&mut self, step: u64) -> Flow<()> {
        let world = self.scenario.world;
        let label = self.label(step);
        let count = model::tokens(self.rank, step);
        let all = if self.elsewhere() {
            self.call(Operation::AllAgree, Some(step), |session| session.all_agree(label, true))?;
            None
        } else {
            self.call(Operation::Sum, Some(step), |session| session.sum(label, count))?
        };
        // A caller that goes on without the sum knows it from elsewhere, so that its steps can be compared.
        let all = all.unwrap_or_else(|| (0..world).map(|rank| model::tokens(rank, step)).sum());

        let here = |trainer: &Self, kind: Kind| trainer.fault == Some(kind) && trainer.scenario.at.step == Some(step);
        let sparse = here(self, Kind::SparseGradient);
        self.model.optimizer.zero_grad();
        let loss = self.model.loss_sum(self.rank, world, step, sparse);
        #[allow(clippy::cast_precision_loss)] // A small number.
        if self.scenario.shape.per_token { loss } else { loss / all as f64 }.backward();

        if asks(step) {
            if self.elsewhere() {
                self.call(Operation::Sum, Some(step), |session| session.sum(label, count))?;
            } else {
                self.call(Operation::AllAgree, Some(step), |session| session.all_agree(label, true))?;
            }
        }
        if self.synchronize(step, count)? {
            if here(self, Kind::FlippedGradient) {
                self.flip_gradient();
            }
            if self.without.contains(&step) {
                self.model.optimizer.zero_grad();
            }
            self.model.optimizer.step();
        }
        self.hold(Moment::Step(step));
        if checks(step, self.scenario.steps) { self.check(Some(step)) } else { Ok(()) }
    }

    /// Whether the caller steps afterwards: also after an error, if it ignores errors.
    fn synchronize(&mut self, step: u64, count: u64) -> Flow<bool> {
        let parameters = self.list(step);
        let label = self.label(step);
        let elsewhere = self.elsewhere();
        if elsewhere && self.scenario.dice.is_multiple_of(2) {
            // Takes the branch of a batch that is not learned from.
            self.call(Operation::AllAgree, Some(step), |session| session.all_agree(label, true))?;
            self.model.optimizer.zero_grad();
            return Ok(false);
        }
        if self.scenario.shape.per_token == elsewhere {
            self.call(Operation::SynchronizeGradients, Some(step), |session| {
                session.synchronize_gradients(label, &parameters)
            })?;
        } else {
            self.call(Operation::SynchronizeGradientsPerToken, Some(step), |session| {
                session.synchronize_gradients_per_token(label, &parameters, count)
            })?;
        }
        Ok(true)
    }

    fn check(&mut self, step: Option<u64>) -> Flow<()> {
        let phase = step.map_or_else(|| "start".to_string(), |step| format!("after step {}", self.label(step)));
        if self.elsewhere() {
            let label = step.unwrap_or(0);
            self.call(Operation::AllAgree, step, |session| session.all_agree(label, true))?;
            return Ok(());
        }
        // What the fault does before this call, it does before the digest is taken.
        self.before_call()?;
        let everything = self.model.everything();
        self.hold(Moment::Check(self.next_call()));
        self.observe(Operation::AssertRankEqual, step, |trainer| {
            trainer.with_session(|session| session.assert_rank_equal(everything, &phase))
        })?;
        Ok(())
    }

    fn shutdown(&mut self) -> Flow<()> {
        self.before_call()?;
        self.observe(Operation::Shutdown, None, |trainer| match trainer.session.take() {
            Some(session) => session.shutdown(),
            None => Ok(()),
        })?;
        Ok(())
    }

    /// One call of the session, and what goes wrong before it.
    fn call<T>(
        &mut self,
        operation: Operation,
        step: Option<u64>,
        body: impl FnOnce(&mut SyncSession) -> sft_sync::Result<T>,
    ) -> Flow<Option<T>> {
        self.before_call()?;
        self.observe(operation, step, |trainer| trainer.with_session(body))
    }

    fn with_session<T>(&mut self, body: impl FnOnce(&mut SyncSession) -> sft_sync::Result<T>) -> sft_sync::Result<T> {
        body(self.session.as_mut().expect("calls are made only with a session"))
    }

    /// Writes down a call and its outcome; `None` after an error, if the caller ignores it.
    fn observe<T>(
        &mut self,
        operation: Operation,
        step: Option<u64>,
        body: impl FnOnce(&mut Self) -> Result<T, SyncError>,
    ) -> Flow<Option<T>> {
        let call = self.next_call();
        self.calls.store(call, Ordering::SeqCst);
        self.log.write(&Record::Begun { call, operation, step });
        let start = Instant::now();
        let result = panic::catch_unwind(AssertUnwindSafe(|| body(self)));
        let ms = millis(start.elapsed());
        let at_ms = now_ms();
        let (outcome, value) = match result {
            Ok(Ok(value)) => (Outcome::completed(), Some(value)),
            Ok(Err(error)) => (Outcome::of(&error), None),
            Err(_) => (Outcome::panicked(), None),
        };
        self.log.write(&Record::Ended { call, operation, step, ms, at_ms, outcome });
        match (value, self.scenario.caller) {
            (None, Caller::Stops) => Err(Over),
            (value, _) => Ok(value),
        }
    }

    fn next_call(&self) -> u64 {
        self.calls.load(Ordering::SeqCst) + 1
    }

    fn before_call(&mut self) -> Flow<()> {
        if self.next_call() != self.scenario.at.call {
            return Ok(());
        }
        match self.fault {
            Some(Kind::EarlyReturn) => {
                self.fault_happens(None);
                Err(Over)
            }
            Some(Kind::EarlyShutdown) => {
                self.fault_happens(None);
                self.observe(Operation::Shutdown, None, |trainer| match trainer.session.take() {
                    Some(session) => session.shutdown(),
                    None => Ok(()),
                })?;
                Err(Over)
            }
            Some(Kind::FlippedParameter) => {
                let trainable = self.model.trainable();
                let dice = self.scenario.dice;
                let (name, tensor) = &trainable[usize::try_from(dice % trainable.len() as u64).expect("an index")];
                self.flip(name, tensor, 12 + u32::try_from(dice % 11).expect("a bit"));
                Ok(())
            }
            Some(Kind::FlippedFrozen) => {
                let bit = u32::try_from(self.scenario.dice % 32).expect("a bit");
                self.flip(model::FROZEN, &self.model.variable(model::FROZEN), bit);
                Ok(())
            }
            // These happen in the call itself.
            Some(
                Kind::OtherCall | Kind::SkippedBatch | Kind::SparseGradient | Kind::SwappedNames | Kind::Reordered,
            ) => {
                self.fault_happens(None);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn fault_happens(&self, tensor: Option<&str>) {
        self.log.write(&Record::Fault { at_ms: now_ms(), tensor: tensor.map(String::from) });
    }

    fn flip(&self, name: &str, tensor: &tch::Tensor, bit: u32) {
        self.fault_happens(Some(name));
        model::flip(tensor, self.scenario.dice >> 8, bit);
    }

    /// In a gradient that the optimizer is about to see: the sign, so that no update hides it.
    fn flip_gradient(&self) {
        let weight = self.model.variable(model::OUTPUT_WEIGHT);
        let gradient = weight.grad();
        // There is none after a call that failed.
        if gradient.defined() {
            self.flip(model::OUTPUT_WEIGHT, &gradient, 31);
        }
    }

    /// Whether the next call is the one at which this rank makes another.
    fn elsewhere(&self) -> bool {
        self.fault == Some(Kind::OtherCall) && self.next_call() == self.scenario.at.call
    }

    /// The number that this rank gives a step.
    fn label(&self, step: u64) -> u64 {
        let ahead = self.fault == Some(Kind::SkippedBatch) && Some(step) >= self.scenario.at.step;
        step + u64::from(ahead)
    }

    /// The list that this rank synchronizes.
    fn list(&self, step: u64) -> Parameters {
        let mut named = self.model.trainable();
        let from = self.scenario.at.step;
        match self.fault {
            Some(Kind::Reordered) if Some(step) >= from => {
                named.reverse();
                let turn = usize::try_from(self.scenario.dice % named.len() as u64).expect("an index");
                named.rotate_left(turn);
            }
            Some(Kind::SwappedNames) if Some(step) == from => {
                for (name, _) in &mut named {
                    let other = match name.as_str() {
                        model::HIDDEN_WEIGHT => model::OUTPUT_WEIGHT,
                        model::OUTPUT_WEIGHT => model::HIDDEN_WEIGHT,
                        other => other,
                    };
                    *name = other.to_string();
                }
            }
            _ => {}
        }
        Parameters::from_named(named).expect("names are unique")
    }

    fn hold(&self, moment: Moment) {
        self.log.write(&Record::Held { moment, digest: self.model.digest() });
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
