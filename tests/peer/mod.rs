//! The Python side of the conformance tests: what it is given, how it is run, and what it answers.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

/// A peer that takes longer is ended.
const PATIENCE: Duration = Duration::from_secs(120);

/// The exit status that says that there is no torch.
const NO_TORCH: i32 = 3;

/// A tensor by its storage: both sides lay it out from this.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) kind: Kind,
    pub(crate) size: Vec<i64>,
    pub(crate) stride: Vec<i64>,
    /// In elements, as the strides.
    pub(crate) offset: i64,
    pub(crate) storage: Vec<u8>,
    pub(crate) conjugate: bool,
    pub(crate) negative: bool,
}

impl Source {
    /// A tensor of its own memory, with exactly these strides.
    pub(crate) fn tensor(&self) -> Tensor {
        let elements = i64::try_from(self.storage.len() / self.kind.elt_size_in_bytes()).unwrap();
        let storage = Tensor::f_from_data_size(&self.storage, &[elements], self.kind).unwrap();
        let mut tensor = storage.as_strided(&self.size, &self.stride, self.offset);
        if self.conjugate {
            tensor = tensor.conj();
        }
        if self.negative {
            tensor = tensor.internal_neg_view();
        }
        tensor
    }

    /// The bytes in logical order, worked out without torch. Without the lazy bits.
    pub(crate) fn logical_bytes(&self) -> Vec<u8> {
        let width = self.kind.elt_size_in_bytes();
        let numel: i64 = self.size.iter().product();
        (0..numel)
            .flat_map(|index| {
                let mut rest = index;
                let mut at = self.offset;
                for (size, stride) in self.size.iter().zip(&self.stride).rev() {
                    at += rest % size * stride;
                    rest /= size;
                }
                let at = usize::try_from(at).unwrap() * width;
                self.storage[at..at + width].iter().copied()
            })
            .collect()
    }
}

/// A parameter as one rank holds it.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) value: Source,
    pub(crate) trainable: bool,
    pub(crate) gradient: Option<Source>,
}

/// One way through all parameters.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) transport: &'static str,
    pub(crate) bucket_bytes: usize,
    pub(crate) in_place_bytes: usize,
}

/// Named tensors that are to be compared over ranks.
pub(crate) type Check = Vec<(String, Option<Source>)>;

/// What one rank is given.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) checks: Vec<Check>,
    pub(crate) digests: Vec<Source>,
}

/// What one rank comes to in one run; parameters in name order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RunResult {
    pub(crate) values: Vec<Vec<u8>>,
    pub(crate) value_digests: Vec<String>,
    pub(crate) broadcast_buckets: usize,
    pub(crate) used: Vec<bool>,
    pub(crate) gradients: Vec<Option<Vec<u8>>>,
    pub(crate) gradient_digests: Vec<Option<String>>,
    pub(crate) buckets: usize,
}

/// What one rank comes to.
#[derive(Debug)]
pub(crate) struct RankResult {
    pub(crate) runs: Vec<RunResult>,
    /// For each check, the names that differ; `None` where all are equal.
    pub(crate) checks: Vec<Option<Vec<String>>>,
    pub(crate) digests: Vec<String>,
}

/// Lets torch do it: one process for each rank.
///
/// # Panics
///
/// If it fails or takes too long, or there is no torch: without it nothing can be compared.
#[track_caller]
pub(crate) fn run(ranks: &[Inputs], runs: &[Run]) -> Vec<RankResult> {
    let folder = tempfile::tempdir().unwrap();
    write_job(folder.path(), ranks, runs);
    launch(folder.path());
    (0..ranks.len()).map(|rank| read_result(folder.path(), rank)).collect()
}

// ---- running it ----------------------------------------------------------------------------------------------------

/// A process group that does not outlive this value.
struct Group(Child);

impl Group {
    fn finish(&mut self, patience: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < patience {
            if let Some(status) = self.0.try_wait().unwrap() {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // An exited leader has waited for its ranks, or its group still has members and so its number.
        if !self.0.try_wait().is_ok_and(|status| status.is_some_and(|status| status.success())) {
            let _ = killpg(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), Signal::SIGKILL);
            let _ = self.0.wait();
        }
    }
}

#[track_caller]
fn launch(folder: &Path) {
    let python = env::var_os("SFT_SYNC_PYTHON").unwrap_or_else(|| OsString::from("python3"));
    let hint = "set SFT_SYNC_PYTHON to a Python that has the PyTorch these tests are linked with, and numpy";
    let messages = folder.join("messages");
    let child = Command::new(&python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peer/peer.py"))
        .arg(folder)
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&messages).unwrap())
        .process_group(0)
        .spawn()
        .unwrap_or_else(|error| panic!("the conformance tests need {}: {error}; {hint}", python.display()));
    let status = Group(child).finish(PATIENCE);
    let said = fs::read_to_string(&messages).unwrap_or_default();
    match status {
        Some(status) if status.success() => {}
        Some(status) if status.code() == Some(NO_TORCH) => panic!("{said}{hint}"),
        Some(status) => panic!("the PyTorch side failed, {status}:\n{said}"),
        None => panic!("the PyTorch side had not finished after {PATIENCE:?}:\n{said}"),
    }
}

// ---- what goes there -----------------------------------------------------------------------------------------------

#[derive(Serialize)]
struct Job<'a> {
    seconds: u64,
    runs: &'a [Run],
    ranks: Vec<RankJob>,
}

#[derive(Serialize)]
struct RankJob {
    parameters: Vec<ParameterJob>,
    checks: Vec<Vec<NamedJob>>,
    digests: Vec<TensorJob>,
}

#[derive(Serialize)]
struct ParameterJob {
    name: String,
    value: TensorJob,
    trainable: bool,
    gradient: Option<TensorJob>,
}

#[derive(Serialize)]
struct NamedJob {
    name: String,
    value: Option<TensorJob>,
}

#[derive(Serialize)]
struct TensorJob {
    dtype: &'static str,
    size: Vec<i64>,
    stride: Vec<i64>,
    offset: i64,
    at: usize,
    bytes: usize,
    conjugate: bool,
    negative: bool,
}

/// All storages, one after another.
#[derive(Default)]
struct Blob(Vec<u8>);

impl Blob {
    fn put(&mut self, source: &Source) -> TensorJob {
        let at = self.0.len();
        self.0.extend_from_slice(&source.storage);
        TensorJob {
            dtype: dtype(source.kind),
            size: source.size.clone(),
            stride: source.stride.clone(),
            offset: source.offset,
            at,
            bytes: source.storage.len(),
            conjugate: source.conjugate,
            negative: source.negative,
        }
    }
}

fn write_job(folder: &Path, ranks: &[Inputs], runs: &[Run]) {
    let mut blob = Blob::default();
    let ranks = ranks
        .iter()
        .map(|inputs| RankJob {
            parameters: inputs
                .parameters
                .iter()
                .map(|parameter| ParameterJob {
                    name: parameter.name.clone(),
                    value: blob.put(&parameter.value),
                    trainable: parameter.trainable,
                    gradient: parameter.gradient.as_ref().map(|gradient| blob.put(gradient)),
                })
                .collect(),
            checks: inputs
                .checks
                .iter()
                .map(|check| {
                    check
                        .iter()
                        .map(|(name, value)| NamedJob {
                            name: name.clone(),
                            value: value.as_ref().map(|value| blob.put(value)),
                        })
                        .collect()
                })
                .collect(),
            digests: inputs.digests.iter().map(|source| blob.put(source)).collect(),
        })
        .collect();
    let job = Job { seconds: PATIENCE.as_secs(), runs, ranks };
    fs::write(folder.join("job.json"), serde_json::to_vec(&job).unwrap()).unwrap();
    fs::write(folder.join("job.bin"), blob.0).unwrap();
}

/// torch's name for an element type.
fn dtype(kind: Kind) -> &'static str {
    match kind {
        Kind::Uint8 => "uint8",
        Kind::Int8 => "int8",
        Kind::Int16 => "int16",
        Kind::Int => "int32",
        Kind::Int64 => "int64",
        Kind::Half => "float16",
        Kind::Float => "float32",
        Kind::Double => "float64",
        Kind::ComplexHalf => "complex32",
        Kind::ComplexFloat => "complex64",
        Kind::ComplexDouble => "complex128",
        Kind::Bool => "bool",
        Kind::BFloat16 => "bfloat16",
        Kind::Float8e5m2 => "float8_e5m2",
        Kind::Float8e4m3fn => "float8_e4m3fn",
        Kind::Float8e5m2fnuz => "float8_e5m2fnuz",
        Kind::Float8e4m3fnuz => "float8_e4m3fnuz",
        Kind::QInt8 | Kind::QUInt8 | Kind::QInt32 => unreachable!("quantized tensors have no plain bytes"),
    }
}

// ---- what comes back -----------------------------------------------------------------------------------------------

#[derive(Deserialize)]
struct Answer {
    runs: Vec<RunAnswer>,
    checks: Vec<Option<Vec<String>>>,
    digests: Vec<String>,
}

#[derive(Deserialize)]
struct RunAnswer {
    values: Vec<Span>,
    value_digests: Vec<String>,
    broadcast_buckets: usize,
    used: Vec<bool>,
    gradients: Vec<Option<Span>>,
    gradient_digests: Vec<Option<String>>,
    buckets: usize,
}

#[derive(Deserialize)]
struct Span {
    at: usize,
    bytes: usize,
}

fn read_result(folder: &Path, rank: usize) -> RankResult {
    let answer: Answer =
        serde_json::from_slice(&fs::read(folder.join(format!("result-{rank}.json"))).unwrap()).unwrap();
    let blob = fs::read(folder.join(format!("result-{rank}.bin"))).unwrap();
    let cut = |span: Span| blob[span.at..span.at + span.bytes].to_vec();
    let runs = answer
        .runs
        .into_iter()
        .map(|run| RunResult {
            values: run.values.into_iter().map(cut).collect(),
            value_digests: run.value_digests,
            broadcast_buckets: run.broadcast_buckets,
            used: run.used,
            gradients: run.gradients.into_iter().map(|span| span.map(cut)).collect(),
            gradient_digests: run.gradient_digests,
            buckets: run.buckets,
        })
        .collect();
    RankResult { runs, checks: answer.checks, digests: answer.digests }
}
