//! Digests of tensors and of lists of them (invariant I7).

use std::fmt;

use itertools::Itertools;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use sha2::{Digest as _, Sha256};
use tch::Tensor;

use crate::collective::c10d;
use crate::error::{TensorError, TensorProblem};
use crate::parameters::NamedTensor;
use crate::tensor::{DType, inspect};

/// A SHA-256 digest.
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
    Some(format!("(torch.Size([{}]), torch.{})", shape.iter().join(", "), dtype.name()?))
}

fn hash(head: &str, bytes: &[u8]) -> Digest {
    let mut hasher = Sha256::new();
    hasher.update(head.as_bytes());
    hasher.update(bytes);
    Digest(hasher.finalize().into())
}

/// A tensor that is ready to be hashed: checked, and with its text made.
struct Prepared<'a> {
    name: &'a str,
    tensor: Option<(&'a Tensor, String, String)>,
    in_place: bool,
    nbytes: usize,
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

    /// Digests of all tensors, in name order. Contiguous CPU tensors are hashed where they lie, several at a time; the
    /// others are brought into that form one after another.
    pub(crate) fn digests(&self, tensors: &[NamedTensor]) -> Result<Vec<Entry>, TensorError> {
        let mut prepared = tensors.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        prepared.sort_by_key(|tensor| tensor.name);
        if let Some((twice, _)) = prepared.iter().tuple_windows().find(|(a, b)| a.name == b.name) {
            return Err(TensorError::new(twice.name, TensorProblem::DuplicateName));
        }

        let mut entries: Vec<Option<Entry>> = vec![None; prepared.len()];
        let mut borrowed = Vec::new();
        for (index, tensor) in prepared.iter().enumerate() {
            let Some((handle, head, kind)) = &tensor.tensor else {
                entries[index] = Some(Entry { name: tensor.name.into(), content: None });
                continue;
            };
            let problem = |problem: crate::error::EngineError| TensorError::new(tensor.name, problem.into());
            if tensor.in_place {
                borrowed.push((index, tensor, head, kind, c10d::bytes(handle).map_err(problem)?));
            } else {
                let copy = c10d::materialize(handle).map_err(problem)?;
                let digest = hash(head, c10d::bytes(&copy).map_err(problem)?);
                let content = Some(Content { digest, kind: kind.clone() });
                entries[index] = Some(Entry { name: tensor.name.into(), content });
            }
        }
        // Large ones first, so that no core is left with the largest at the end.
        borrowed.sort_by_key(|(_, tensor, ..)| std::cmp::Reverse(tensor.nbytes));
        // Names and byte slices cross threads; tensors do not.
        let jobs: Vec<(usize, &str, &str, &str, &[u8])> = borrowed
            .iter()
            .map(|(index, tensor, head, kind, bytes)| (*index, tensor.name, head.as_str(), kind.as_str(), *bytes))
            .collect();
        let hashed: Vec<(usize, Entry)> = self.pool.install(|| {
            jobs.par_iter()
                .with_max_len(1)
                .map(|(index, name, head, kind, bytes)| {
                    let content = Some(Content { digest: hash(head, bytes), kind: (*kind).to_string() });
                    (*index, Entry { name: (*name).to_string(), content })
                })
                .collect()
        });
        for (index, entry) in hashed {
            entries[index] = Some(entry);
        }
        Ok(entries.into_iter().flatten().collect())
    }
}

fn prepare(named: &NamedTensor) -> Result<Prepared<'_>, TensorError> {
    let name = named.name.as_str();
    let Some(tensor) = &named.tensor else {
        return Ok(Prepared { name, tensor: None, in_place: false, nbytes: 0 });
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
    Ok(Prepared {
        name,
        in_place: facts.contiguous && facts.device().is_cpu(),
        nbytes: facts.nbytes(),
        tensor: Some((tensor, head, kind)),
    })
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
    let Some((tensor, head, _)) = &prepared.tensor else {
        return Err(TensorError::new("tensor", TensorProblem::Undefined).into());
    };
    let engine = |error: crate::error::EngineError| TensorError::new("tensor", error.into());
    let plain = c10d::materialize(tensor).map_err(engine)?;
    Ok(hash(head, c10d::bytes(&plain).map_err(engine)?))
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
