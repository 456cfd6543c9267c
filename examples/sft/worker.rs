//! One rank, from connecting to saving: the training loop that uses `sft-sync`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sft_sync::{Digest, Parameters, SyncSession, Verified, tensor_digest};
use tch::nn::{self, OptimizerConfig};
use tch::{Kind, Tensor};

use crate::Outcome;
use crate::data::{Batches, Dataset, Example, share};
use crate::launch;
use crate::model::{Model, RESERVE};
use crate::options::{Options, Training};
use crate::progress::{self, Progress};
use crate::report::{self, Losses, Summary};

/// High enough that an adapter which decayed by mistake would show it.
const WEIGHT_DECAY: f64 = 0.1;
/// Examples that are evaluated at once.
const EVALUATION_BATCH: usize = 8;

/// Runs as the rank that the environment says.
pub(crate) fn run(options: &Options, dataset: &Dataset) -> Outcome<()> {
    launch::die_with_launcher()?;
    let mut session = connect(options.threads)?;
    let training = &options.training;
    check_same_start(&mut session, training, dataset)?;

    let model = build(training, session.rank());
    let everything = Parameters::all(model.store())?;
    let trainable = Parameters::trainable(model.store())?;
    // The base never moves, so one look at the start is enough; the adapters are made equal by sending them.
    let _ = session.assert_rank_equal(everything.frozen(), "frozen base")?;
    session.broadcast_trainable_parameters(&trainable)?;
    let reserve = reserve_digests(&trainable)?;

    let mut trainer = Trainer::new(session, &model, &trainable, dataset, training)?;
    let held_out_before = trainer.evaluate(0)?;
    let history = trainer.train()?;
    let held_out_after = trainer.evaluate(training.steps)?;
    let Trainer { mut session, .. } = trainer;

    let verified = session.assert_rank_equal(everything.values(), "end of training")?;
    if reserve_digests(&trainable)? != reserve {
        return Err("the adapter that was never used has changed".into());
    }
    let adapters = save_together(&mut session, options, &trainable, &verified)?;
    let absent = session.sum(training.steps, history.steps_with_absent)?;
    if session.rank() == 0 {
        let summary = Summary {
            world_size: session.world_size(),
            held_out_before,
            held_out_after,
            synchronizing: progress::share(history.synchronizing, history.took),
            adapters: adapters.display().to_string(),
        };
        print_results(&summary, &history, absent, &trainable, &verified);
        if let Some(directory) = &options.report {
            report::write(directory, &history.losses, &summary)?;
        }
    }
    session.shutdown()?;
    Ok(())
}

/// As [`SyncSession::from_env`], with limits that fit a short run.
fn connect(threads: u8) -> Outcome<SyncSession> {
    tch::set_num_threads(i32::from(threads));
    Ok(SyncSession::builder_from_env()?
        .threads(usize::from(threads))
        .connect_timeout(Duration::from_secs(60))
        .operation_timeout(Duration::from_secs(120))
        .build()?)
}

/// Another learning rate or another data file on one machine would train, and train the wrong thing.
fn check_same_start(session: &mut SyncSession, training: &Training, dataset: &Dataset) -> Outcome<()> {
    let settings = Tensor::from_slice(&serde_json::to_vec(training)?);
    let start = [("settings", settings), ("data", dataset.fingerprint())];
    let _ = session.assert_rank_equal(start, "settings and data")?;
    Ok(())
}

/// The adapters start differently on each rank, to show that the broadcast makes them equal.
fn build(training: &Training, rank: usize) -> Model {
    let seed = i64::from(training.seed);
    let adapter_seed = seed + 1 + i64::try_from(rank).unwrap_or(0);
    Model::new(training.context, seed, adapter_seed)
}

fn reserve_digests(trainable: &Parameters) -> Outcome<BTreeMap<String, Digest>> {
    trainable
        .iter()
        .filter(|(name, _)| name.starts_with(RESERVE))
        .map(|(name, tensor)| Ok((name.to_string(), tensor_digest(tensor)?)))
        .collect()
}

/// What happened in one step.
#[derive(Debug)]
pub(crate) struct Step {
    /// Global loss per token; `None` if all ranks skipped the step.
    pub(crate) loss: Option<f64>,
    /// Response tokens of all ranks.
    pub(crate) tokens: u64,
    /// Time for the whole step.
    pub(crate) took: Duration,
    /// Time of it in which gradients were synchronized, waiting for the other ranks included.
    pub(crate) synchronizing: Duration,
    globally_unused: usize,
    locally_absent: usize,
}

/// What happened in all steps, on this rank.
#[derive(Debug, Default)]
struct History {
    losses: Losses,
    took: Duration,
    synchronizing: Duration,
    /// Steps in which this rank had no gradient for a parameter, and another rank had.
    steps_with_absent: u64,
    fewest_unused: usize,
    most_unused: usize,
}

impl History {
    fn add(&mut self, step: &Step) {
        let first = self.losses.iter().all(Option::is_none);
        self.losses.push(step.loss);
        self.took += step.took;
        self.synchronizing += step.synchronizing;
        if step.loss.is_none() {
            return;
        }
        self.steps_with_absent += u64::from(step.locally_absent > 0);
        self.most_unused = self.most_unused.max(step.globally_unused);
        self.fewest_unused = if first { step.globally_unused } else { self.fewest_unused.min(step.globally_unused) };
    }
}

struct Trainer<'a> {
    session: SyncSession,
    model: &'a Model,
    trainable: &'a Parameters,
    dataset: &'a Dataset,
    training: &'a Training,
    optimizer: nn::Optimizer,
}

impl<'a> Trainer<'a> {
    fn new(
        session: SyncSession,
        model: &'a Model,
        trainable: &'a Parameters,
        dataset: &'a Dataset,
        training: &'a Training,
    ) -> Outcome<Self> {
        let optimizer = nn::AdamW::default().wd(WEIGHT_DECAY).build(model.store(), training.lr)?;
        Ok(Self { session, model, trainable, dataset, training, optimizer })
    }

    fn train(&mut self) -> Outcome<History> {
        let progress = Progress::new(self.session.rank(), self.session.world_size(), self.training.steps);
        let batches = Batches::new(self.training.seed, self.dataset.training.len(), self.training.batch);
        let mut history = History::default();
        for (step, batch) in (0..self.training.steps).zip(batches) {
            let done = self.step(step, &batch)?;
            progress.show(step, &done);
            history.add(&done);
        }
        progress.finish();
        Ok(history)
    }

    fn step(&mut self, step: u64, batch: &[usize]) -> Outcome<Step> {
        let start = Instant::now();
        let examples: Vec<&Example> = self.share(batch.iter().map(|index| &self.dataset.training[*index]));
        // The tokens of every micro-batch on every rank, before the first backward pass: each token then weighs the
        // same, whichever rank and micro-batch it has come to.
        let tokens = self.session.sum(step, examples.iter().map(|example| example.tokens()).sum::<u64>())?;
        let loss_sum = self.backward(step, &examples, tokens);
        let mut done = Step {
            loss: None,
            tokens,
            took: Duration::ZERO,
            synchronizing: Duration::ZERO,
            globally_unused: 0,
            locally_absent: 0,
        };
        // One rank alone must not skip: the others would wait for its gradients.
        if self.session.all_agree(step, loss_sum.is_finite())? {
            let report = self.session.synchronize_gradients(step, self.trainable)?;
            self.optimizer.step();
            done.synchronizing = report.total;
            done.globally_unused = report.globally_unused;
            done.locally_absent = report.locally_absent;
            done.loss = Some(self.session.sum(step, loss_sum)? / float(tokens));
        }
        // Makes gradients undefined, not zero: what is not used in the next step has none.
        self.optimizer.zero_grad();
        done.took = start.elapsed();
        Ok(done)
    }

    /// Goes backward from each micro-batch; the sum of this rank's losses.
    fn backward(&self, step: u64, examples: &[&Example], tokens: u64) -> f64 {
        let breaks = self.training.break_step == Some(step) && self.session.rank() + 1 == self.session.world_size();
        let mut total = if breaks { f64::NAN } else { 0.0 };
        // A rank may have fewer examples than micro-batches, or none: it then has no gradients.
        let size = examples.len().div_ceil(self.training.accumulation).max(1);
        for micro_batch in examples.chunks(size) {
            let loss_sum = self.model.loss_sum(&self.dataset.collate(micro_batch));
            total += loss_sum.double_value(&[]);
            (loss_sum / float(tokens)).backward();
        }
        total
    }

    /// Loss per token of the held-out examples. Each rank takes its share of them.
    fn evaluate(&mut self, step: u64) -> Outcome<f64> {
        let examples: Vec<&Example> = self.share(&self.dataset.held_out);
        let mut loss_sum = 0.0;
        for batch in examples.chunks(EVALUATION_BATCH) {
            loss_sum += tch::no_grad(|| self.model.loss_sum(&self.dataset.collate(batch))).double_value(&[]);
        }
        let tokens = self.session.sum(step, examples.iter().map(|example| example.tokens()).sum::<u64>())?;
        Ok(self.session.sum(step, loss_sum)? / float(tokens))
    }

    fn share<'b>(&self, all: impl IntoIterator<Item = &'b Example>) -> Vec<&'b Example> {
        share(all, self.session.rank(), self.session.world_size())
    }
}

#[allow(clippy::cast_precision_loss)] // A step has far fewer than 2^53 tokens.
fn float(tokens: u64) -> f64 {
    tokens as f64
}

/// Rank 0 saves; all ranks learn whether it has.
fn save_together(
    session: &mut SyncSession,
    options: &Options,
    trainable: &Parameters,
    verified: &Verified,
) -> Outcome<PathBuf> {
    let saved = if session.rank() == 0 {
        save(options.out.as_deref(), trainable)
            .and_then(|path| check_saved(&path, &options.training, verified).map(|()| path))
    } else {
        Ok(PathBuf::new())
    };
    let all_well = session.all_agree(options.training.steps, saved.is_ok())?;
    let path = saved?;
    if all_well { Ok(path) } else { Err("rank 0 could not save the adapters".into()) }
}

/// Under another name first: what is there under `out` is always whole.
fn save(out: Option<&Path>, trainable: &Parameters) -> Outcome<PathBuf> {
    let path = match out {
        Some(path) => path.to_path_buf(),
        None => tempfile::Builder::new().prefix("sft-").tempdir()?.keep().join("adapters.safetensors"),
    };
    let partial = path.with_extension("partial");
    let adapters: Vec<(&str, &Tensor)> = trainable.iter().collect();
    Tensor::write_safetensors(&adapters, &partial)?;
    std::fs::rename(&partial, &path)?;
    Ok(path)
}

/// Loads the adapters into a new model with other adapters, and compares every tensor of it, the base included, with
/// what all ranks held at the end.
fn check_saved(path: &Path, training: &Training, verified: &Verified) -> Outcome<()> {
    let fresh = build(training, usize::from(u8::MAX));
    let mut variables = fresh.store().variables();
    for (name, saved) in Tensor::read_safetensors(path)? {
        let variable = variables.get_mut(&name).ok_or_else(|| format!("the model has no variable {name}"))?;
        tch::no_grad(|| variable.f_copy_(&saved.to_kind(Kind::Float)))?;
    }
    for (name, digest) in verified.digests() {
        let variable = variables.get(name).ok_or_else(|| format!("the fresh model has no variable {name}"))?;
        if Some(tensor_digest(variable)?) != digest {
            return Err(format!("{}: {name} is not what was saved", path.display()).into());
        }
    }
    Ok(())
}

fn print_results(summary: &Summary, history: &History, absent: u64, trainable: &Parameters, verified: &Verified) {
    let skipped = history.losses.iter().filter(|loss| loss.is_none()).count();
    println!("ranks: {}, steps: {}, skipped: {skipped}", summary.world_size, history.losses.len());
    println!(
        "parameters: {} trainable tensors; {} to {} of them used by no rank in a step",
        trainable.len(),
        history.fewest_unused,
        history.most_unused
    );
    println!("absent: in {absent} cases a rank had no gradient in a step for a tensor that another rank used");
    println!("never used: the reserve adapter is unchanged, bit for bit, in spite of weight decay");
    println!("replicas: equal, {} tensors, sha256 {}", verified.digests().count(), verified.root());
    println!("adapters: {} (loaded into a fresh model and found equal)", summary.adapters);
    println!("held-out loss: {:.4} -> {:.4}", summary.held_out_before, summary.held_out_after);
    println!("synchronizing: {:.1}% of the steps' time", 100.0 * summary.synchronizing);
}
