//! What can go wrong, as data: [`SyncError`] and what its variants carry.

#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// The result of an operation on a session.
pub type Result<T> = std::result::Result<T, SyncError>;

/// Why an operation did not do what it was asked for.
///
/// Variants that concern all ranks ([`Refused`], [`Desynchronized`], [`SchemaDiffers`], [`RanksDiffer`],
/// [`Uncountable`], [`CommitRefused`]) are the same on every rank, in the same call, and come before any data has moved:
/// the session stays usable. [`Interrupted`] means that a process or a link failed: survivors may see it one call apart, and the
/// session refuses everything afterwards ([`Poisoned`]).
///
/// [`Refused`]: Self::Refused
/// [`Desynchronized`]: Self::Desynchronized
/// [`SchemaDiffers`]: Self::SchemaDiffers
/// [`RanksDiffer`]: Self::RanksDiffer
/// [`Uncountable`]: Self::Uncountable
/// [`CommitRefused`]: Self::CommitRefused
/// [`Interrupted`]: Self::Interrupted
/// [`Poisoned`]: Self::Poisoned
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyncError {
    /// A setting of the builder, or a variable of the environment, is missing or makes no sense. Local.
    #[error("{setting}: {problem}")]
    Configuration {
        /// The setting or variable.
        setting: String,
        /// What is wrong with it, and what it should be.
        problem: String,
    },
    /// The ranks did not come together. Bounded by the connect deadline.
    #[error(transparent)]
    Connect(Box<ConnectError>),
    /// A tensor given to a constructor cannot be used. Local: no other rank was asked.
    #[error(transparent)]
    Tensor(Box<TensorError>),
    /// A tensor on some rank cannot take part. The same on every rank; nothing has moved.
    #[error(transparent)]
    Refused(Box<Refusal>),
    /// Ranks made different calls, or made them with different steps, phases or options. The same on every rank;
    /// nothing has moved.
    #[error(transparent)]
    Desynchronized(Box<Desynchronization>),
    /// Ranks hold different parameter lists. The same on every rank; nothing has moved.
    #[error(transparent)]
    SchemaDiffers(Box<SchemaDifference>),
    /// The replicas are not equal. The same on every rank.
    #[error(transparent)]
    RanksDiffer(Box<Divergence>),
    /// A sum over ranks has no usable value: a token count to divide gradients by is zero over all ranks, or an integer
    /// sum does not fit its type. The same on every rank; no tensor has moved.
    #[error("{at}: {problem}")]
    Uncountable {
        /// The call.
        at: Position,
        /// Zero, or an overflow.
        problem: String,
    },
    /// A checkpoint was not committed, or not known to last. The same on every rank; the session goes on. What stands
    /// under the checkpoint's name is the old one or the new one, complete.
    #[error(transparent)]
    CommitRefused(Box<CommitRefusal>),
    /// A checkpoint, or a tensor loaded from it, is not what was saved. Local.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// A process or a link failed, or the deadline passed, while ranks depended on each other. The session is poisoned.
    #[error(transparent)]
    Interrupted(Box<Interruption>),
    /// An earlier call of this session failed in the middle: nothing is done any more.
    #[error("this session was given up, build a new one; first cause: {first}")]
    Poisoned {
        /// What ended the session.
        #[source]
        first: Arc<SyncError>,
    },
}

impl SyncError {
    /// A process or a link failed, now or earlier in this session: what other ranks saw may differ by one call.
    pub fn is_interrupted(&self) -> bool {
        match self {
            Self::Interrupted(_) => true,
            Self::Poisoned { first } => first.is_interrupted(),
            _ => false,
        }
    }

    /// All ranks are there and have refused together: every one of them holds this same error.
    pub fn is_disagreement(&self) -> bool {
        matches!(
            self,
            Self::Refused(_)
                | Self::Desynchronized(_)
                | Self::SchemaDiffers(_)
                | Self::RanksDiffer(_)
                | Self::Uncountable { .. }
                | Self::CommitRefused(_)
        )
    }

    /// The session that returned this error can do nothing more.
    pub fn needs_rebuild(&self) -> bool {
        matches!(self, Self::Interrupted(_) | Self::Poisoned { .. })
    }

    pub(crate) fn configuration(setting: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Configuration { setting: setting.into(), problem: problem.into() }
    }
}

/// The operations that ranks carry out together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[repr(u8)]
pub enum Operation {
    /// The first agreement, at the end of connecting.
    Connect = 1,
    /// `broadcast_trainable_parameters`.
    BroadcastParameters = 2,
    /// `synchronize_gradients`.
    SynchronizeGradients = 3,
    /// `synchronize_gradients_per_token`.
    SynchronizeGradientsPerToken = 4,
    /// `assert_rank_equal`.
    AssertRankEqual = 5,
    /// `all_agree`.
    AllAgree = 6,
    /// `sum`.
    Sum = 7,
    /// `shutdown`.
    Shutdown = 8,
    /// `commit_checkpoint`.
    CommitCheckpoint = 9,
}

impl Operation {
    /// The name of the method.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::BroadcastParameters => "broadcast_trainable_parameters",
            Self::SynchronizeGradients => "synchronize_gradients",
            Self::SynchronizeGradientsPerToken => "synchronize_gradients_per_token",
            Self::AssertRankEqual => "assert_rank_equal",
            Self::AllAgree => "all_agree",
            Self::Sum => "sum",
            Self::Shutdown => "shutdown",
            Self::CommitCheckpoint => "commit_checkpoint",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where in its sequence of calls a rank is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Position {
    /// The operation.
    pub operation: Operation,
    /// The caller's step, for operations that take one.
    pub step: Option<u64>,
    /// The caller's phase, for operations that take one.
    pub phase: Option<String>,
    /// The number of this call, counted from the start of the session: the same on all ranks that are together.
    pub call: u64,
    /// The bucket in work, counted from 0, and how many there are.
    pub bucket: Option<(usize, usize)>,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", self.operation)?;
        if let Some(step) = self.step {
            write!(f, "step {step}, ")?;
        }
        if let Some(phase) = &self.phase {
            write!(f, "phase {phase:?}, ")?;
        }
        write!(f, "call {}", self.call)?;
        if let Some((index, count)) = self.bucket {
            write!(f, ", bucket {} of {count}", index + 1)?;
        }
        f.write_str(")")
    }
}

/// What kind of failure the engine (c10d, Gloo, torch) reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EngineErrorKind {
    /// The time for a wait was up.
    Timeout,
    /// A peer, or the way to it, is gone.
    ConnectionLost,
    /// Anything else, with the engine's message.
    Other,
}

/// A failure inside libtorch, with its message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EngineError {
    kind: EngineErrorKind,
    message: String,
}

impl EngineError {
    pub(crate) fn new(kind: EngineErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(crate) fn timeout(message: impl Into<String>) -> Self {
        Self::new(EngineErrorKind::Timeout, message)
    }

    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self::new(EngineErrorKind::Other, message)
    }

    /// The same failure, told with what was going on.
    pub(crate) fn context(self, doing: &str) -> Self {
        Self { kind: self.kind, message: format!("{doing}: {}", self.message) }
    }

    /// What kind of failure it was.
    pub fn kind(&self) -> EngineErrorKind {
        self.kind
    }

    /// The engine's message.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl From<tch::TchError> for EngineError {
    fn from(error: tch::TchError) -> Self {
        // libtorch appends a C++ stack trace to its message; the first line says it all.
        let text = error.to_string();
        Self::other(text.lines().next().unwrap_or_default())
    }
}

/// How far connecting had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectStage {
    /// Comparing the loaded library with the headers that the crate was compiled with.
    Library,
    /// Reaching, or hosting, the store.
    Store,
    /// Claiming this rank and waiting for the others.
    Rendezvous,
    /// Connecting every rank with every other.
    Mesh,
}

impl fmt::Display for ConnectStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Library => "checking libtorch",
            Self::Store => "reaching the store",
            Self::Rendezvous => "waiting for the other ranks",
            Self::Mesh => "connecting the ranks with each other",
        })
    }
}

/// The ranks did not come together.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank} of {world_size} could not connect ({stage}, after {waited:.1?} of {limit:.1?}): {problem}")]
#[non_exhaustive]
pub struct ConnectError {
    /// This rank.
    pub rank: usize,
    /// The number of ranks expected.
    pub world_size: usize,
    /// How far it had come.
    pub stage: ConnectStage,
    /// How long it took.
    pub waited: Duration,
    /// The deadline for connecting.
    pub limit: Duration,
    /// What was wrong.
    pub problem: ConnectProblem,
}

/// What was wrong when connecting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectProblem {
    /// The program was compiled with the headers of one PyTorch and runs with another.
    #[error(
        "compiled with the headers of PyTorch {compiled}, but PyTorch {loaded} is loaded: rebuild, or mend the \
         loader's path"
    )]
    LibraryVersion {
        /// Version of the headers.
        compiled: String,
        /// Version of the library.
        loaded: String,
    },
    /// The store could not be reached, or not be hosted.
    #[error("the store at {address} cannot be used: {source}")]
    Store {
        /// Where it should be.
        address: String,
        /// The engine's message.
        source: EngineError,
    },
    /// Another process has already come as this rank.
    #[error("another process has already come as rank {rank}")]
    DuplicateRank {
        /// The rank that came twice.
        rank: usize,
    },
    /// Ranks were started with different world sizes.
    #[error("this rank was started for {here} ranks, another one for {elsewhere}")]
    WorldSize {
        /// The world size of this rank.
        here: usize,
        /// The world size of the first rank that came.
        elsewhere: usize,
    },
    /// Another rank called the whole thing off, with this message.
    #[error("called off by another rank: {0}")]
    CalledOff(String),
    /// Some ranks never came.
    #[error("these ranks did not come: {}", ranks(missing))]
    Missing {
        /// They.
        missing: Vec<usize>,
    },
    /// The engine failed.
    #[error("{0}")]
    Engine(EngineError),
}

/// A tensor that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("tensor {tensor:?}: {problem}")]
#[non_exhaustive]
pub struct TensorError {
    /// Its name.
    pub tensor: String,
    /// What is wrong with it.
    pub problem: TensorProblem,
}

impl TensorError {
    pub(crate) fn new(tensor: impl Into<String>, problem: TensorProblem) -> Self {
        Self { tensor: tensor.into(), problem }
    }
}

impl From<TensorError> for SyncError {
    fn from(error: TensorError) -> Self {
        Self::Tensor(Box::new(error))
    }
}

/// What is wrong with a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TensorProblem {
    /// The list holds this name twice.
    #[error("the name occurs twice")]
    DuplicateName,
    /// It holds nothing.
    #[error("the tensor is undefined")]
    Undefined,
    /// Only dense tensors are supported.
    #[error("the tensor is sparse; dense tensors are needed")]
    Sparse,
    /// A layout that is neither strided nor sparse.
    #[error("the tensor has an unusual layout (mkldnn or jagged); a strided one is needed")]
    Layout,
    /// Quantized tensors carry more than their bytes.
    #[error("the tensor is quantized ({dtype})")]
    Quantized {
        /// Its dtype.
        dtype: String,
    },
    /// A meta tensor has no data.
    #[error("the tensor is on the meta device and holds no data")]
    Meta,
    /// A device that this build cannot serve.
    #[error("the tensor is on {device}, which this build cannot synchronize; only CPU tensors are supported")]
    Device {
        /// The device.
        device: String,
    },
    /// The data plane cannot sum this dtype.
    #[error("gradients of {dtype} cannot be summed by Gloo")]
    Unsummable {
        /// The dtype.
        dtype: String,
    },
    /// A dtype that has no stable text form.
    #[error("the dtype (c10 code {code}) is not supported")]
    Dtype {
        /// Its number in `c10::ScalarType`.
        code: i8,
    },
    /// Two parameters share memory without being one tensor.
    #[error("its storage overlaps that of {other:?}")]
    Overlap {
        /// The other parameter.
        other: String,
    },
    /// The gradients of two parameters share memory.
    #[error("its gradient's storage overlaps that of the gradient of {other:?}")]
    GradientOverlap {
        /// The other parameter.
        other: String,
    },
    /// Its gradient is sparse.
    #[error("its gradient is sparse; synchronization requires dense gradients")]
    SparseGradient,
    /// Its gradient is not strided, or quantized, or has no data.
    #[error("its gradient is not a plain dense tensor ({kind})")]
    StrangeGradient {
        /// What it is.
        kind: String,
    },
    /// Its gradient has another dtype.
    #[error("its gradient is {gradient}, the parameter {parameter}")]
    GradientDtype {
        /// The parameter's dtype.
        parameter: String,
        /// The gradient's dtype.
        gradient: String,
    },
    /// Its gradient is on another device.
    #[error("its gradient is on {gradient}, the parameter on {parameter}")]
    GradientDevice {
        /// The parameter's device.
        parameter: String,
        /// The gradient's device.
        gradient: String,
    },
    /// Its gradient has another shape.
    #[error("its gradient has shape {gradient:?}, the parameter {parameter:?}")]
    GradientShape {
        /// The parameter's shape.
        parameter: Vec<i64>,
        /// The gradient's shape.
        gradient: Vec<i64>,
    },
    /// Its elements share memory (an expanded tensor), so that it cannot be written.
    #[error("elements of the tensor share memory (it is expanded): it cannot be written")]
    Expanded,
    /// The engine could not read it.
    #[error("{message}")]
    Engine {
        /// Its message.
        message: String,
    },
}

/// A tensor on some rank cannot take part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: refused by rank {rank}: {error}{}", also(.others))]
#[non_exhaustive]
pub struct Refusal {
    /// The call.
    pub at: Position,
    /// The lowest rank that refused.
    pub rank: usize,
    /// Which tensor of that rank, and what is wrong with it.
    pub error: TensorError,
    /// Other ranks that refused as well.
    pub others: Vec<usize>,
}

fn also(others: &[usize]) -> String {
    if others.is_empty() { String::new() } else { format!(" (refused too by {})", ranks(others)) }
}

/// What ranks did not agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DesynchronizedField {
    /// Builds of the crate that do not speak the same protocol.
    Protocol,
    /// Different methods were called.
    Operation,
    /// The same method, with different steps.
    Step,
    /// The same method, with different phases.
    Phase,
    /// Sessions built with different options, or versions of the crate.
    Options,
    /// Different numbers of calls were made.
    Sequence,
    /// Different values in an exchange that should be the same by construction.
    Content,
}

impl fmt::Display for DesynchronizedField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Protocol => "protocol version",
            Self::Operation => "operation",
            Self::Step => "step",
            Self::Phase => "phase",
            Self::Options => "session options",
            Self::Sequence => "number of calls",
            Self::Content => "content of the exchange",
        })
    }
}

/// Ranks made different calls.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ranks are at different places ({field} differs): {}", sides.iter().map(|side| format!("{}: {}", ranks(&side.ranks), side.value)).join("; "))]
#[non_exhaustive]
pub struct Desynchronization {
    /// This rank's call.
    pub call: u64,
    /// The first thing that differs.
    pub field: DesynchronizedField,
    /// Who holds what, in the order of the lowest rank on each side.
    pub sides: Vec<Side>,
}

/// Ranks that hold the same value, where others hold another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Side {
    /// The ranks, ascending.
    pub ranks: Vec<usize>,
    /// What they hold.
    pub value: String,
}

/// Groups ranks by value, in the order of the lowest rank of each group.
pub(crate) fn sides(values: impl IntoIterator<Item = String>) -> Vec<Side> {
    let mut sides: Vec<Side> = Vec::new();
    for (rank, value) in values.into_iter().enumerate() {
        match sides.iter_mut().find(|side| side.value == value) {
            Some(side) => side.ranks.push(rank),
            None => sides.push(Side { ranks: vec![rank], value }),
        }
    }
    sides
}

/// Ranks hold different parameter lists.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: ranks hold different parameters, first at {name:?} (number {index} in name order): {}", sides.iter().map(|side| format!("{}: {}", ranks(&side.ranks), side.value)).join("; "))]
#[non_exhaustive]
pub struct SchemaDifference {
    /// The call.
    pub at: Position,
    /// Where the lists differ first, counted from 0 in name order.
    pub index: usize,
    /// The name of the first parameter that is not the same on all ranks.
    pub name: String,
    /// Who holds what under that name.
    pub sides: Vec<Side>,
}

/// The replicas are not equal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct Divergence {
    /// The call.
    pub at: Position,
    /// How many names were compared, over all ranks.
    pub compared: usize,
    /// Each tensor that is not the same on all ranks, in name order.
    pub tensors: Vec<TensorDivergence>,
    /// Where the first tensor that all ranks hold with one dtype and shape differs first, if there is such a tensor.
    pub first: Option<FirstDifference>,
}

/// The first element that is not the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FirstDifference {
    /// The name of the tensor.
    pub tensor: String,
    /// The element's position, one number a dimension.
    pub index: Vec<i64>,
    /// Who holds what there: the value, and its bits in hexadecimal. At most eight sides.
    pub sides: Vec<Side>,
    /// Chunks of 1 MiB that the tensor has.
    pub chunks: usize,
    /// How many of them are not the same on all ranks.
    pub chunks_differing: usize,
}

/// A tensor that is not the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorDivergence {
    /// Its name.
    pub name: String,
    /// Ranks that hold the same, in the order of the lowest rank of each group; the value gives dtype, shape and the
    /// start of the digest, or says that the tensor is absent.
    pub sides: Vec<Side>,
    /// The index in `sides` of the group that holds more than half of the ranks, if there is one.
    pub majority: Option<usize>,
}

impl Divergence {
    const SHOWN: usize = 8;
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: replicas differ: {} of {} tensors are not the same on all ranks",
            self.at,
            self.tensors.len(),
            self.compared
        )?;
        for tensor in self.tensors.iter().take(Self::SHOWN) {
            let groups = tensor.sides.iter().map(|side| format!("{}: {}", ranks(&side.ranks), side.value)).join("; ");
            let majority = match tensor.majority {
                Some(side) => format!("majority: {}", ranks(&tensor.sides[side].ranks)),
                None => "no majority: which side is right cannot be told".to_string(),
            };
            write!(f, "\n  {}: {groups} ({majority})", tensor.name)?;
        }
        if self.tensors.len() > Self::SHOWN {
            write!(f, "\n  and {} more", self.tensors.len() - Self::SHOWN)?;
        }
        if let Some(first) = &self.first {
            let values = first.sides.iter().map(|side| format!("{}: {}", ranks(&side.ranks), side.value)).join("; ");
            write!(
                f,
                "\n  first in {} at {:?}: {values} ({} of its {} chunks of 1 MiB differ)",
                first.tensor, first.index, first.chunks_differing, first.chunks
            )?;
        }
        Ok(())
    }
}

/// Why a checkpoint was not committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: refused by rank {rank}: {problem}")]
#[non_exhaustive]
pub struct CommitRefusal {
    /// The call.
    pub at: Position,
    /// The lowest rank that refused; rank 0, which writes, unless tokens were wrong.
    pub rank: usize,
    /// What was wrong.
    pub problem: CommitProblem,
}

/// What was wrong with a commit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CommitProblem {
    /// The token comes from another session.
    #[error("the token was made by another session")]
    ForeignToken,
    /// The token is not the latest of its session.
    #[error("the token is of the check in call {check}; the latest check was in call {latest}")]
    StaleToken {
        /// The call that made the token.
        check: u64,
        /// The call of the session's latest successful check.
        latest: u64,
    },
    /// The token's digests are not those that a manifest records.
    #[error(
        "the token was made by {algorithm}; a checkpoint needs a check by sha256, which `assert_rank_equal_with` makes \
         whatever the session's algorithm is"
    )]
    Algorithm {
        /// The algorithm of the check.
        algorithm: String,
    },
    /// Ranks brought tokens of different checks.
    #[error("ranks brought tokens of different checks: {}", list(sides))]
    TokensDiffer {
        /// Who brought which.
        sides: Vec<Side>,
    },
    /// The path cannot name a checkpoint.
    #[error("{path:?} cannot name a checkpoint: {problem}")]
    Path {
        /// The path.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The writer returned an error.
    #[error("the writer failed: {message}")]
    Writer {
        /// The writer's error.
        message: String,
    },
    /// The writer panicked.
    #[error("the writer panicked: {message}")]
    WriterPanicked {
        /// The panic's message.
        message: String,
    },
    /// What the writer left cannot be read back.
    #[error("what was written cannot be read back: {message}")]
    Unreadable {
        /// Why not.
        message: String,
    },
    /// The file holds no tensor.
    #[error("what was written holds no tensor")]
    Empty,
    /// The file holds a tensor that the check did not cover.
    #[error("tensor {tensor:?} was written, but the check did not cover it")]
    NotCovered {
        /// The first such tensor in name order.
        tensor: String,
    },
    /// A tensor in the file is not the one that was checked: it was changed in between, as by a step, or not written
    /// faithfully.
    #[error("tensor {tensor:?} was checked as {checked} and written as {written}{}", more(*.others))]
    Differs {
        /// The first such tensor in name order.
        tensor: String,
        /// What was checked.
        checked: String,
        /// What was written.
        written: String,
        /// How many more tensors differ.
        others: usize,
    },
    /// The file system failed.
    #[error("{doing} failed: {message}")]
    Io {
        /// What was being done.
        doing: String,
        /// The system's message.
        message: String,
    },
}

fn more(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => "; 1 more differs".into(),
        _ => format!("; {others} more differ"),
    }
}

fn list(sides: &[Side]) -> String {
    sides.iter().map(|side| format!("{}: {}", ranks(&side.ranks), side.value)).join("; ")
}

/// A checkpoint is not what was saved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("checkpoint {}: {problem}", manifest.display())]
#[non_exhaustive]
pub struct CheckpointError {
    /// The manifest.
    pub manifest: PathBuf,
    /// What is wrong.
    pub problem: CheckpointProblem,
}

/// What is wrong with a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointProblem {
    /// A file cannot be read.
    #[error("{} cannot be read: {message}", file.display())]
    Io {
        /// The manifest, or the data file that it names.
        file: PathBuf,
        /// The system's message.
        message: String,
    },
    /// The manifest is not one, or contradicts itself.
    #[error("the manifest is not usable: {message}")]
    Manifest {
        /// Why.
        message: String,
    },
    /// The data file is not in the format that its extension says.
    #[error("{} is malformed: {message}", file.display())]
    Malformed {
        /// The data file.
        file: PathBuf,
        /// Why.
        message: String,
    },
    /// The data file ends before the end of a tensor.
    #[error("the data file ends within tensor {tensor:?}")]
    CutOff {
        /// The first tensor that is not whole.
        tensor: String,
    },
    /// A tensor that was saved is not there.
    #[error("tensor {tensor:?} was saved and is missing")]
    Missing {
        /// The first such tensor in name order.
        tensor: String,
    },
    /// A tensor is there that was not saved.
    #[error("tensor {tensor:?} is there, but was not saved")]
    Unexpected {
        /// The first such tensor in name order.
        tensor: String,
    },
    /// A tensor is not the one that was saved.
    #[error("tensor {tensor:?} was saved as {saved} and is {found}{}", more(*.others))]
    Differs {
        /// The first such tensor in name order.
        tensor: String,
        /// What was saved.
        saved: String,
        /// What is there.
        found: String,
        /// How many more tensors differ.
        others: usize,
    },
}

/// What a rank was waiting for when an operation was interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// An agreement: ranks tell each other where they are.
    Agreement,
    /// Gathering of details after ranks disagreed.
    Details,
    /// Collective movement of data.
    Data,
    /// Local work between collectives (packing, hashing).
    Local,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agreement => "agreeing with the other ranks",
            Self::Details => "collecting details of a disagreement",
            Self::Data => "moving data",
            Self::Local => "working locally",
        })
    }
}

/// A process or a link failed, or the deadline passed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub struct Interruption {
    /// The call.
    pub at: Position,
    /// What this rank was waiting for.
    pub stage: Stage,
    /// How long the call had lasted when it failed.
    pub waited: Duration,
    /// The deadline of the call.
    pub limit: Duration,
    /// Ranks that did not report after the failure, as far as the store could tell: dead, stopped, cut off, or not yet
    /// arrived at this or a neighbouring call.
    pub missing: Vec<usize>,
    /// Where the ranks that did report were when they failed.
    pub reported: Vec<(usize, Position)>,
    /// The store could not be asked, or not to the end: its host is gone, or does not answer. Some of the missing may
    /// have reported to it.
    pub store_lost: bool,
    /// The call was a broadcast that had begun: parameters hold a mixture.
    pub parameters_unspecified: bool,
    /// What the engine said.
    #[source]
    pub cause: EngineError,
}

impl fmt::Display for Interruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: interrupted after {:.1?} (deadline {:.1?}) while {}: ",
            self.at, self.waited, self.limit, self.stage
        )?;
        if self.store_lost && !self.missing.is_empty() {
            write!(f, "the store's host does not answer, and nothing is known of {}", ranks(&self.missing))?;
        } else if self.missing.is_empty() {
            f.write_str("all ranks have reported the failure")?;
        } else {
            write!(f, "no sign of {}", ranks(&self.missing))?;
        }
        for (rank, position) in self.reported.iter().filter(|(_, position)| position.call != self.at.call) {
            write!(f, "; rank {rank} was at {position}")?;
        }
        if self.parameters_unspecified {
            f.write_str("; the parameters are in part overwritten")?;
        }
        write!(f, " ({})", self.cause)
    }
}

/// "rank 3", or "ranks 0, 2, 4 to 7".
pub(crate) fn ranks(list: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in list {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == rank => *end = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = runs
        .iter()
        .map(|&(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first} to {last}"),
        })
        .join(", ");
    format!("{} {text}", if list.len() == 1 { "rank" } else { "ranks" })
}

#[cfg(test)]
mod tests {
    use super::{ranks, sides};

    #[test]
    fn rank_lists_are_folded_into_runs() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 1]), "ranks 0, 1");
        assert_eq!(ranks(&[0, 2, 4, 5, 6, 7]), "ranks 0, 2, 4 to 7");
    }

    #[test]
    fn sides_are_ordered_by_their_lowest_rank() {
        let groups = sides(["b", "a", "b"].map(String::from));
        assert_eq!(groups.len(), 2);
        assert_eq!((groups[0].value.as_str(), groups[0].ranks.as_slice()), ("b", [0, 2].as_slice()));
        assert_eq!((groups[1].value.as_str(), groups[1].ranks.as_slice()), ("a", [1].as_slice()));
    }
}
