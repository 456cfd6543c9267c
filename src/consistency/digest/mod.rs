//! Digests of tensors and of lists of them (invariant I7).
//!
//! What is hashed is always the text of shape and dtype and then the bytes in logical order, so that strides, lazy bits and
//! the device never matter. How the bytes come to the hash depends on where they lie: contiguous in CPU memory, they
//! are hashed there; otherwise they come in small pieces, or, for the fingerprint of a tensor on a device, not at all.

mod blake3;
pub(crate) mod fingerprint;
mod pieces;
mod sha256;

use std::cmp::Reverse;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use itertools::Itertools;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};
use tch::Tensor;

use self::fingerprint::device::OnDevice;
use crate::collective::c10d::{self, TensorFacts};
use crate::error::{EngineError, TensorError, TensorProblem};
use crate::parameters::NamedTensor;
use crate::tensor::{DType, inspect};

/// What tensors are compared by. The same on all ranks.
///
/// All of them digest the same: shape, dtype and every bit in logical order. They differ in speed, and in what the digest
/// is good for afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DigestAlgorithm {
    /// The reference's digest, [`tensor_digest`]: any program can compute it. One tensor is hashed by one thread.
    #[default]
    Sha256,
    /// BLAKE3 over the same text and bytes: several times as fast, and all threads work on one large tensor. Any program
    /// can compute it.
    Blake3,
    /// A keyed universal hash over the exact bits, computed on the tensor's own device: nothing but a 512th of its size
    /// leaves it.
    ///
    /// Its key is new for every check, so a digest means nothing outside the check that made it. Ranks that differ, in
    /// whatever way and however little, pass as equal with probability at most 2^-66, and with 2^-66 again in the next
    /// check (on top of what it takes to break BLAKE3). That is a bound on accidents: contents made with knowledge of the key,
    /// which ranks share over their own network, can collide.
    Fingerprint,
}

impl DigestAlgorithm {
    /// The name, as reports print it: `sha256`, `blake3` or `fingerprint`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Blake3 => "blake3",
            Self::Fingerprint => "fingerprint",
        }
    }

    /// How it travels.
    pub(crate) fn code(self) -> u64 {
        match self {
            Self::Sha256 => 1,
            Self::Blake3 => 2,
            Self::Fingerprint => 3,
        }
    }
}

impl fmt::Display for DigestAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A digest of 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[pair..pair + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }
}

/// 64 lower-case hexadecimal digits, as Python's `hexdigest()`.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// As [`Display`](fmt::Display).
impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// From 64 hexadecimal digits.
impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::from_hex(&text).ok_or_else(|| serde::de::Error::custom(format!("{text:?} is not a SHA-256 digest")))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// A name with what stands under it on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// `None`: the tensor is absent.
    pub(crate) content: Option<Content>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) digest: Digest,
    /// Dtype and shape, for people.
    pub(crate) kind: String,
}

/// What Python prints for `str((tensor.shape, tensor.dtype))`: the head of the digested text.
///
/// A shape of one dimension has no trailing comma: `(torch.Size([3]), torch.float32)`.
fn head(shape: &[i64], dtype: DType) -> Option<String> {
    Some(head_of(shape, dtype.name()?))
}

fn head_of(shape: &[i64], dtype: &str) -> String {
    format!("(torch.Size([{}]), torch.{dtype})", shape.iter().join(", "))
}

/// The digest of a tensor whose bytes come piece by piece, without torch.
pub(crate) struct Incremental(Sha256);

impl Incremental {
    pub(crate) fn new(shape: &[i64], dtype: &str) -> Self {
        Self(Sha256::new_with_prefix(head_of(shape, dtype)))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// An algorithm with what it needs for one check.
pub(crate) enum Method {
    Sha256,
    Blake3,
    Fingerprint(fingerprint::Key),
}

impl Method {
    /// `secret` and `call` make the key of a fingerprint: the same on all ranks.
    pub(crate) fn new(algorithm: DigestAlgorithm, secret: &[u8; 32], call: u64) -> Self {
        match algorithm {
            DigestAlgorithm::Sha256 => Self::Sha256,
            DigestAlgorithm::Blake3 => Self::Blake3,
            DigestAlgorithm::Fingerprint => Self::Fingerprint(fingerprint::Key::derive(secret, call)),
        }
    }

    /// Of bytes where they lie. Splits over the pool that it is called in, where the algorithm can.
    fn hash(&self, head: &str, bytes: &[u8]) -> Digest {
        Digest(match self {
            Self::Sha256 => sha256::hash(head, bytes),
            Self::Blake3 => blake3::hash(head, bytes),
            Self::Fingerprint(key) => fingerprint::hash(key, head, bytes),
        })
    }

    /// Of what has to be copied first: piece by piece, hashed from cache.
    fn hash_pieces(&self, head: &str, tensor: &Tensor, facts: &TensorFacts) -> Result<Digest, EngineError> {
        let mut stream = match self {
            Self::Sha256 => Stream::Sha256(Sha256::new_with_prefix(head)),
            Self::Blake3 => {
                let mut hasher = Box::new(::blake3::Hasher::new());
                hasher.update(head.as_bytes());
                Stream::Blake3(hasher)
            }
            Self::Fingerprint(key) => {
                Stream::Fingerprint(Box::new(fingerprint::Stream::new(key, head, facts.nbytes())))
            }
        };
        pieces::for_each_bytes(tensor, facts, &mut |bytes| stream.update(bytes))?;
        Ok(stream.finish())
    }
}

enum Stream<'a> {
    Sha256(Sha256),
    Blake3(Box<::blake3::Hasher>),
    Fingerprint(Box<fingerprint::Stream<'a>>),
}

impl Stream<'_> {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Blake3(hasher) => drop(hasher.update(bytes)),
            Self::Fingerprint(stream) => stream.update(bytes),
        }
    }

    fn finish(self) -> Digest {
        Digest(match self {
            Self::Sha256(hasher) => hasher.finalize().into(),
            Self::Blake3(hasher) => *hasher.finalize().as_bytes(),
            Self::Fingerprint(stream) => stream.finish(),
        })
    }
}

/// A tensor that is ready to be hashed: checked, and with its text made.
struct Prepared<'a> {
    name: &'a str,
    tensor: Option<(&'a Tensor, TensorFacts, String, String)>,
}

/// Something for a thread of the pool to hash.
struct Job<'a> {
    index: usize,
    head: &'a str,
    facts: &'a TensorFacts,
    source: Source<'a>,
}

enum Source<'a> {
    /// Contiguous in CPU memory: hashed where it lies.
    Bytes(&'a [u8]),
    /// In CPU memory, with strides or lazy bits.
    Strided(Tensor),
}

impl Job<'_> {
    fn run(&self, method: &Method) -> Result<Digest, EngineError> {
        match &self.source {
            Source::Bytes(bytes) => Ok(method.hash(self.head, bytes)),
            Source::Strided(tensor) => method.hash_pieces(self.head, tensor, self.facts),
        }
    }
}

/// Threads to hash on.
pub(crate) struct Hasher {
    pool: ThreadPool,
}

impl Hasher {
    /// `threads` of 0: one for each core.
    pub(crate) fn new(threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("sft-sync-hash-{index}"))
            .build()?;
        Ok(Self { pool })
    }

    /// Runs parallel work on these threads.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.pool.install(work)
    }

    /// Digests of all tensors, in name order. Those in CPU memory are hashed by the pool, contiguous ones where they lie;
    /// those on a device by the calling thread, whose streams the device's work is ordered by.
    pub(crate) fn digests(&self, method: &Method, tensors: &[NamedTensor]) -> Result<Vec<Entry>, TensorError> {
        let mut prepared = tensors.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        prepared.sort_by_key(|tensor| tensor.name);
        if let Some((twice, _)) = prepared.iter().tuple_windows().find(|(a, b)| a.name == b.name) {
            return Err(TensorError::new(twice.name, TensorProblem::DuplicateName));
        }

        let mut digests: Vec<Option<Digest>> = vec![None; prepared.len()];
        let mut jobs = Vec::new();
        let mut devices = Vec::new();
        for (index, named) in prepared.iter().enumerate() {
            let Some((tensor, facts, head, _)) = &named.tensor else { continue };
            let problem = |error: EngineError| TensorError::new(named.name, error.into());
            if facts.device().is_cpu() {
                let source = source(tensor, facts).map_err(problem)?;
                jobs.push(Job { index, head, facts, source });
            } else {
                let digest = from_device(method, &mut devices, head, tensor, facts).map_err(problem)?;
                digests[index] = Some(digest);
            }
        }
        for (index, digest) in self.run(method, jobs) {
            let problem = |error: EngineError| TensorError::new(prepared[index].name, error.into());
            digests[index] = Some(digest.map_err(problem)?);
        }
        Ok(prepared
            .iter()
            .zip(digests)
            .map(|(named, digest)| {
                let content = named
                    .tensor
                    .as_ref()
                    .zip(digest)
                    .map(|((.., kind), digest)| Content { digest, kind: kind.clone() });
                Entry { name: named.name.to_string(), content }
            })
            .collect())
    }

    /// In no order.
    fn run(&self, method: &Method, mut jobs: Vec<Job<'_>>) -> Vec<(usize, Result<Digest, EngineError>)> {
        // Large ones first, so that no core is left with the largest at the end. Where one job is all that is left, and
        // its algorithm splits it, threads without a job take parts of it.
        jobs.sort_by_key(|job| Reverse(job.facts.nbytes()));
        let queue = Mutex::new(jobs.into_iter());
        let done = self.pool.broadcast(|_| {
            let mut done = Vec::new();
            loop {
                let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(job) = job else { return done };
                done.push((job.index, job.run(method)));
            }
        });
        done.into_iter().flatten().collect()
    }
}

fn source<'a>(tensor: &'a Tensor, facts: &TensorFacts) -> Result<Source<'a>, EngineError> {
    if facts.contiguous { Ok(Source::Bytes(c10d::bytes(tensor)?)) } else { Ok(Source::Strided(tensor.f_detach()?)) }
}

/// Of a tensor outside CPU memory. `devices`: those that the check has met.
fn from_device<'a>(
    method: &'a Method,
    devices: &mut Vec<OnDevice<'a>>,
    head: &str,
    tensor: &Tensor,
    facts: &TensorFacts,
) -> Result<Digest, EngineError> {
    let key = match method {
        // On other devices 64-bit arithmetic is not a given.
        Method::Fingerprint(key) if facts.device().kind() == "cuda" => key,
        _ => return method.hash_pieces(head, &tensor.f_detach()?, facts),
    };
    let device = tensor.device();
    let known = devices.iter().position(|known| known.device() == device).unwrap_or(devices.len());
    if known == devices.len() {
        devices.push(OnDevice::new(key, device)?);
    }
    Ok(Digest(devices[known].hash(head, facts.nbytes(), tensor, facts.contiguous)?))
}

fn prepare(named: &NamedTensor) -> Result<Prepared<'_>, TensorError> {
    let name = named.name.as_str();
    let Some(tensor) = &named.tensor else {
        return Ok(Prepared { name, tensor: None });
    };
    let checked = || {
        let facts = inspect(tensor)?;
        facts.check_plain()?;
        let shape = c10d::sizes(tensor);
        let head = head(shape, facts.dtype()).ok_or(TensorProblem::Dtype { code: facts.scalar_type })?;
        let kind = format!("{} {shape:?}", facts.dtype());
        Ok((facts, head, kind))
    };
    let (facts, head, kind) = checked().map_err(|problem| TensorError::new(name, problem))?;
    Ok(Prepared { name, tensor: Some((tensor, facts, head, kind)) })
}

/// SHA-256 over a fixed first line and then, in name order, for each name: its length in bytes as a little-endian
/// 64-bit number, the name, a byte (1 present, 0 absent) and, if present, the tensor's digest.
pub(crate) fn root(entries: &[Entry]) -> Digest {
    let mut hasher = Sha256::new();
    hasher.update(b"sft-sync root 1\n");
    for entry in entries {
        hasher.update((entry.name.len() as u64).to_le_bytes());
        hasher.update(entry.name.as_bytes());
        match &entry.content {
            Some(content) => {
                hasher.update([1]);
                hasher.update(content.digest.0);
            }
            None => hasher.update([0]),
        }
    }
    Digest(hasher.finalize().into())
}

/// The digest of one tensor: SHA-256 over the text of its shape and dtype as Python prints it, and then its bytes in
/// logical order. Strides, lazy conjugate and negative bits, device and autograd do not matter. Local.
///
/// Equal to `hashlib.sha256(str((t.shape, t.dtype)).encode() + bytes)` on the Python side.
///
/// # Errors
///
/// [`SyncError::Tensor`](crate::SyncError::Tensor) for an undefined, sparse, quantized or meta tensor.
pub fn tensor_digest(tensor: &Tensor) -> crate::Result<Digest> {
    let named = NamedTensor { name: "tensor".into(), tensor: Some(tensor.shallow_clone()) };
    let prepared = prepare(&named)?;
    let Some((tensor, facts, head, _)) = &prepared.tensor else {
        return Err(TensorError::new("tensor", TensorProblem::Undefined).into());
    };
    let hash = || {
        if facts.device().is_cpu() {
            let job = Job { index: 0, head, facts, source: source(tensor, facts)? };
            job.run(&Method::Sha256)
        } else {
            from_device(&Method::Sha256, &mut Vec::new(), head, tensor, facts)
        }
    };
    hash().map_err(|error| TensorError::new("tensor", error.into()).into())
}

#[cfg(test)]
mod tests {
    use super::{Digest, head};
    use crate::tensor::DType;

    #[test]
    fn heads_are_what_python_prints() {
        assert_eq!(head(&[2, 3], DType(6)).unwrap(), "(torch.Size([2, 3]), torch.float32)");
        assert_eq!(head(&[3], DType(15)).unwrap(), "(torch.Size([3]), torch.bfloat16)");
        assert_eq!(head(&[], DType(11)).unwrap(), "(torch.Size([]), torch.bool)");
        assert_eq!(head(&[1], DType(16)), None);
    }

    #[test]
    fn hexadecimal_goes_both_ways() {
        let digest = Digest(std::array::from_fn(|index| u8::try_from(index * 7 % 251).unwrap()));
        assert_eq!(Digest::from_hex(&digest.to_string()), Some(digest));
        assert_eq!(Digest::from_hex("ab"), None);
        assert_eq!(Digest::from_hex(&"g".repeat(64)), None);
    }
}
