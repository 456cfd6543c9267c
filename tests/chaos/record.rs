//! What a rank writes down: one line of JSON for each thing that happens, at once, so that it outlives the process.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sft_sync::{Operation, SyncError};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Record {
    /// A call begins.
    Begun { call: u64, operation: Operation, step: Option<u64> },
    /// A call has returned.
    Ended { call: u64, operation: Operation, step: Option<u64>, ms: f64, at_ms: f64, outcome: Outcome },
    /// All tensors of the model, as one digest.
    Held { moment: Moment, digest: String },
    /// The fault happens now; in which tensor, if it is in one.
    Fault { at_ms: f64, tensor: Option<String> },
    /// The session has been dropped.
    Dropped { ms: f64 },
    /// The training function has returned.
    Done { at_ms: f64 },
}

/// When a digest was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Moment {
    /// Before the first step.
    Start,
    /// Right before this call, which compares replicas.
    Check(u64),
    /// After the optimizer's step.
    Step(u64),
}

/// How a call ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) kind: OutcomeKind,
    /// The error as people see it.
    pub(crate) text: String,
    /// Ranks that an interruption names, none if the store is lost.
    pub(crate) missing: Vec<usize>,
    pub(crate) store_lost: bool,
    /// Who refused which tensor.
    pub(crate) refused: Option<(usize, String)>,
    /// Tensors that differ: name, the ranks on each side, which side is the majority.
    pub(crate) differing: Vec<(String, Vec<Vec<usize>>, Option<usize>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OutcomeKind {
    Completed,
    Interrupted,
    Poisoned,
    Refused,
    Desynchronized,
    SchemaDiffers,
    RanksDiffer,
    Panicked,
    /// Whatever no scenario should lead to.
    Unexpected,
}

impl Outcome {
    pub(crate) fn completed() -> Self {
        Self::bare(OutcomeKind::Completed, String::new())
    }

    pub(crate) fn panicked() -> Self {
        Self::bare(OutcomeKind::Panicked, "panicked".into())
    }

    fn bare(kind: OutcomeKind, text: String) -> Self {
        Self { kind, text, missing: Vec::new(), store_lost: false, refused: None, differing: Vec::new() }
    }

    pub(crate) fn of(error: &SyncError) -> Self {
        let mut outcome = Self::bare(OutcomeKind::Unexpected, error.to_string());
        match error {
            SyncError::Interrupted(interruption) if error.is_interrupted() => {
                outcome.kind = OutcomeKind::Interrupted;
                outcome.missing.clone_from(&interruption.missing);
                outcome.store_lost = interruption.store_lost;
            }
            SyncError::Poisoned { .. } if error.is_interrupted() && error.needs_rebuild() => {
                outcome.kind = OutcomeKind::Poisoned;
            }
            _ if !error.is_disagreement() => {}
            SyncError::Refused(refusal) => {
                outcome.kind = OutcomeKind::Refused;
                outcome.refused = Some((refusal.rank, refusal.error.tensor.clone()));
            }
            SyncError::Desynchronized(_) => outcome.kind = OutcomeKind::Desynchronized,
            SyncError::SchemaDiffers(_) => outcome.kind = OutcomeKind::SchemaDiffers,
            SyncError::RanksDiffer(divergence) => {
                outcome.kind = OutcomeKind::RanksDiffer;
                outcome.differing = divergence
                    .tensors
                    .iter()
                    .map(|tensor| {
                        let sides = tensor.sides.iter().map(|side| side.ranks.clone()).collect();
                        (tensor.name.clone(), sides, tensor.majority)
                    })
                    .collect();
            }
            _ => {}
        }
        outcome
    }
}

/// Where records go.
#[derive(Clone)]
pub(crate) struct Log(Arc<Mutex<Sink>>);

enum Sink {
    File(File),
    Memory(Vec<Record>),
}

impl Log {
    pub(crate) fn to_file(path: &Path) -> io::Result<Self> {
        Ok(Self(Arc::new(Mutex::new(Sink::File(File::options().create(true).append(true).open(path)?)))))
    }

    pub(crate) fn in_memory() -> Self {
        Self(Arc::new(Mutex::new(Sink::Memory(Vec::new()))))
    }

    pub(crate) fn write(&self, record: &Record) {
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::File(file) => {
                let mut line = serde_json::to_vec(record).expect("a record is JSON");
                line.push(b'\n');
                // One write: a line is there whole or not at all.
                file.write_all(&line).expect("the log can be written");
            }
            Sink::Memory(records) => records.push(record.clone()),
        }
    }

    pub(crate) fn in_memory_records(&self) -> Vec<Record> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::File(_) => Vec::new(),
            Sink::Memory(records) => records.clone(),
        }
    }
}

pub(crate) fn read(path: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Milliseconds on the clock that all processes of a machine share.
pub(crate) fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64() * 1000.0)
}
