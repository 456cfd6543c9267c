//! Tensors in a file: their names, shapes, dtypes and digests, by the format that the extension says, as
//! `VarStore::load` tells formats apart.
//!
//! Safetensors files are read without torch, block by block, so that files larger than memory can be verified. The other
//! formats are torch's own, and torch reads them.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use tch::{Device, Tensor};

use super::digest::{Hasher, Incremental, Method};
use super::manifest::SavedTensor;
use crate::parameters::NamedTensor;
use crate::tensor::inspect;

/// Small enough for the second-level cache, where hashing is fastest, and large enough for any disk.
const BLOCK: usize = 1 << 20;
/// As in the safetensors library: no real header comes near.
const LARGEST_HEADER: u64 = 100_000_000;

/// Why a file's tensors could not be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    Io(io::Error),
    Malformed(String),
    /// The file ends within this tensor.
    CutOff(String),
    /// The deadline has passed.
    Late,
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Malformed(message) => f.write_str(message),
            Self::CutOff(tensor) => write!(f, "the file ends within tensor {tensor:?}"),
            Self::Late => f.write_str("the deadline has passed"),
        }
    }
}

/// All tensors of the file, in name order. `late` is asked again and again whether to give up.
pub(crate) fn read(
    path: &Path,
    hasher: &Hasher,
    late: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<SavedTensor>, ReadError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => read_safetensors(path, hasher, late),
        extension => read_with_torch(path, hasher, matches!(extension, Some("bin" | "pt"))),
    }
}

/// A tensor of a safetensors file, before its bytes are read.
struct Placed {
    name: String,
    dtype: &'static str,
    shape: Vec<i64>,
    start: u64,
    end: u64,
}

fn read_safetensors(
    path: &Path,
    hasher: &Hasher,
    late: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<SavedTensor>, ReadError> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut placed = header(&file, length)?;
    // In file order, the first tensor that is not whole is the one to name.
    placed.sort_by_key(|tensor| (tensor.start, tensor.end));
    if let Some(tensor) = placed.iter().find(|tensor| tensor.end > length) {
        return Err(ReadError::CutOff(tensor.name.clone()));
    }
    let end = placed.iter().map(|tensor| tensor.end).max();
    if end.is_some_and(|end| end < length) {
        return Err(ReadError::Malformed("bytes follow the last tensor".into()));
    }
    let mut tensors = hasher.install(|| {
        placed.into_par_iter().with_max_len(1).map(|tensor| hash(&file, tensor, late)).collect::<Result<Vec<_>, _>>()
    })?;
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

/// The table at the start of a safetensors file, with offsets from the start of the file.
fn header(file: &File, length: u64) -> Result<Vec<Placed>, ReadError> {
    let malformed = |message: String| ReadError::Malformed(message);
    let mut size = [0; 8];
    if length < 8 {
        return Err(malformed(format!("{length} bytes are too few for a safetensors file")));
    }
    file.read_exact_at(&mut size, 0)?;
    let size = u64::from_le_bytes(size);
    if size > LARGEST_HEADER || 8 + size > length {
        return Err(malformed(format!("a header of {size} bytes cannot be, in a file of {length}")));
    }
    let mut text = vec![0; usize::try_from(size).unwrap_or(0)];
    file.read_exact_at(&mut text, 8)?;
    // Checks as it is made: offsets without gaps or overlaps, and sizes that follow from shapes and dtypes.
    let metadata: Metadata =
        serde_json::from_slice(&text).map_err(|error| malformed(format!("the header is not usable: {error}")))?;
    metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let too_large = || malformed(format!("tensor {name:?} is too large"));
            let offset = |offset: usize| {
                u64::try_from(offset).ok().and_then(|offset| offset.checked_add(8 + size)).ok_or_else(too_large)
            };
            Ok(Placed {
                dtype: dtype_name(info.dtype)
                    .ok_or_else(|| malformed(format!("tensor {name:?} has the dtype {:?}", info.dtype)))?,
                shape: info
                    .shape
                    .iter()
                    .map(|size| i64::try_from(*size))
                    .collect::<Result<_, _>>()
                    .map_err(|_| too_large())?,
                start: offset(info.data_offsets.0)?,
                end: offset(info.data_offsets.1)?,
                name,
            })
        })
        .collect()
}

fn hash(file: &File, tensor: Placed, late: &(dyn Fn() -> bool + Sync)) -> Result<SavedTensor, ReadError> {
    let mut digest = Incremental::new(&tensor.shape, tensor.dtype);
    let longest = usize::try_from(tensor.end - tensor.start).unwrap_or(BLOCK).min(BLOCK);
    let mut buffer = vec![0; longest];
    let mut at = tensor.start;
    while at < tensor.end {
        if late() {
            return Err(ReadError::Late);
        }
        let block = usize::try_from(tensor.end - at).unwrap_or(BLOCK).min(BLOCK);
        file.read_exact_at(&mut buffer[..block], at)?;
        digest.update(&buffer[..block]);
        at += block as u64;
    }
    Ok(SavedTensor { name: tensor.name, dtype: tensor.dtype.into(), shape: tensor.shape, sha256: digest.finish() })
}

/// The name that Python prints after `torch.`.
fn dtype_name(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::BOOL => "bool",
        Dtype::U8 => "uint8",
        Dtype::I8 => "int8",
        Dtype::U16 => "uint16",
        Dtype::I16 => "int16",
        Dtype::U32 => "uint32",
        Dtype::I32 => "int32",
        Dtype::U64 => "uint64",
        Dtype::I64 => "int64",
        Dtype::F8_E5M2 => "float8_e5m2",
        Dtype::F8_E4M3 => "float8_e4m3fn",
        Dtype::F8_E5M2FNUZ => "float8_e5m2fnuz",
        Dtype::F8_E4M3FNUZ => "float8_e4m3fnuz",
        Dtype::F8_E8M0 => "float8_e8m0fnu",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        Dtype::F32 => "float32",
        Dtype::F64 => "float64",
        // 64 bits in all.
        Dtype::C64 => "complex64",
        // Elements of less than a byte have no counterpart.
        _ => return None,
    })
}

fn read_with_torch(path: &Path, hasher: &Hasher, pickled: bool) -> Result<Vec<SavedTensor>, ReadError> {
    // A file that is not there should be told as that, and not in torch's words.
    File::open(path)?;
    let loaded = if pickled {
        Tensor::loadz_multi_with_device(path, Device::Cpu)
    } else {
        Tensor::load_multi_with_device(path, Device::Cpu)
    };
    let loaded = loaded.map_err(|error| {
        let text = error.to_string();
        ReadError::Malformed(text.lines().next().unwrap_or_default().to_string())
    })?;
    let named: Vec<NamedTensor> = loaded.into_iter().map(NamedTensor::from).collect();
    describe(&named, hasher).map_err(|error| ReadError::Malformed(error.to_string()))
}

/// What a file would hold that has these tensors; absent ones are left out.
fn describe(named: &[NamedTensor], hasher: &Hasher) -> Result<Vec<SavedTensor>, crate::error::TensorError> {
    let entries = hasher.digests(&Method::Sha256, named)?;
    let by_name: std::collections::HashMap<&str, &Tensor> =
        named.iter().filter_map(|named| Some((named.name.as_str(), named.tensor.as_ref()?))).collect();
    entries
        .into_iter()
        .filter_map(|entry| {
            let tensor = by_name.get(entry.name.as_str())?;
            let sha256 = entry.content?.digest;
            Some(inspect(tensor).map_err(|problem| crate::error::TensorError::new(&entry.name, problem)).map(|facts| {
                SavedTensor { shape: tensor.size(), dtype: facts.dtype().to_string(), name: entry.name, sha256 }
            }))
        })
        .collect()
}
