//! The manifest of a checkpoint: what a reader opens, and what it verifies the data with.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::digest::{Content, Digest, Entry, Hasher, Method, root};
use super::saved::{self, ReadError};
use crate::error::{CheckpointError, CheckpointProblem, Result, SyncError};
use crate::parameters::NamedTensor;

/// First field of a manifest. Changes with its meaning.
pub(crate) const FORMAT: &str = "sft-sync checkpoint 1";

/// Where the manifest of a checkpoint is, from the path that
/// [`commit_checkpoint`](crate::SyncSession::commit_checkpoint) was given: the same with `.json` appended.
///
/// ```
/// let manifest = sft_sync::manifest_path("run/adapters.safetensors");
/// assert_eq!(manifest, std::path::Path::new("run/adapters.safetensors.json"));
/// ```
pub fn manifest_path(checkpoint: impl AsRef<Path>) -> PathBuf {
    let mut path = checkpoint.as_ref().as_os_str().to_os_string();
    path.push(".json");
    path.into()
}

/// A tensor of the data file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SavedTensor {
    /// Its name.
    pub name: String,
    /// Its element type, as Python prints it after `torch.`.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its digest, as [`tensor_digest`](crate::tensor_digest) makes it.
    pub sha256: Digest,
}

impl SavedTensor {
    pub(crate) fn entry(&self) -> Entry {
        let kind = format!("{} {:?}", self.dtype, self.shape);
        Entry { name: self.name.clone(), content: Some(Content { digest: self.sha256, kind }) }
    }
}

/// Something that all ranks were checked to hold when the checkpoint was made, and that is not in the data file: a frozen
/// base, a scalar, an absent tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckedTensor {
    /// Its name.
    pub name: String,
    /// Its element type and shape, for people; `None`: it was absent.
    pub kind: Option<String>,
    /// Its digest; `None`: it was absent.
    pub sha256: Option<Digest>,
}

impl CheckedTensor {
    pub(crate) fn new(entry: &Entry) -> Self {
        Self {
            name: entry.name.clone(),
            kind: entry.content.as_ref().map(|content| content.kind.clone()),
            sha256: entry.content.as_ref().map(|content| content.digest),
        }
    }

    fn entry(&self) -> Entry {
        let content = self.sha256.map(|digest| Content { digest, kind: self.kind.clone().unwrap_or_default() });
        Entry { name: self.name.clone(), content }
    }
}

/// What a committed checkpoint is, as its manifest says. A JSON file with these fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// "sft-sync checkpoint 1".
    pub format: String,
    /// The name of the data file, in the same folder.
    pub data: String,
    /// The root digest over the tensors of the data file: the same as that of a state dict with the same tensors.
    pub root: Digest,
    /// The root digest of the check that preceded: [`Verified::root`](crate::Verified::root).
    pub checked_root: Digest,
    /// The phase of that check.
    pub phase: String,
    /// The step of the last gradients that were synchronized before, if there were any.
    pub step: Option<u64>,
    /// The number of ranks.
    pub world_size: usize,
    /// The version of this crate that wrote it.
    pub crate_version: String,
    /// The tensors of the data file, in name order.
    pub tensors: Vec<SavedTensor>,
    /// What else was checked, in name order.
    pub also_checked: Vec<CheckedTensor>,
    /// Where it was read from.
    #[serde(skip)]
    path: PathBuf,
}

/// What a manifest is made from.
pub(crate) struct Facts<'a> {
    pub(crate) data: String,
    pub(crate) root: Digest,
    pub(crate) checked: &'a super::Verified,
    pub(crate) step: Option<u64>,
    pub(crate) world_size: usize,
    pub(crate) tensors: Vec<SavedTensor>,
}

/// What manifests of every format have.
#[derive(Deserialize)]
struct Head {
    format: String,
}

impl Manifest {
    pub(crate) fn new(path: &Path, facts: Facts<'_>) -> Self {
        let saved: BTreeSet<&str> = facts.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let also_checked = facts
            .checked
            .entries()
            .iter()
            .filter(|entry| !saved.contains(entry.name.as_str()))
            .map(CheckedTensor::new)
            .collect();
        Self {
            format: FORMAT.into(),
            data: facts.data,
            root: facts.root,
            checked_root: facts.checked.root(),
            phase: facts.checked.phase().into(),
            step: facts.step,
            world_size: facts.world_size,
            crate_version: env!("CARGO_PKG_VERSION").into(),
            tensors: facts.tensors,
            also_checked,
            path: path.into(),
        }
    }

    /// Reads a manifest, and checks that it agrees with itself. Opens no data. Local.
    ///
    /// # Errors
    ///
    /// [`SyncError::Checkpoint`] if it cannot be read, is not a manifest, or its digests contradict each other.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        Self::read_from(path.as_ref()).map_err(|problem| error(path.as_ref(), problem))
    }

    pub(crate) fn read_from(path: &Path) -> std::result::Result<Self, CheckpointProblem> {
        let text = fs::read(path).map_err(|error| unreadable(path, &error))?;
        let unusable = |message: String| CheckpointProblem::Manifest { message };
        let json = |error: serde_json::Error| unusable(error.to_string());
        // Before the rest: another format may have other fields.
        let head: Head = serde_json::from_slice(&text).map_err(json)?;
        if head.format != FORMAT {
            return Err(unusable(format!("its format is {:?}, this version reads {FORMAT:?}", head.format)));
        }
        let manifest = Self { path: path.into(), ..serde_json::from_slice(&text).map_err(json)? };
        if Path::new(&manifest.data).file_name().and_then(|name| name.to_str()) != Some(&manifest.data) {
            return Err(unusable(format!("{:?} is not the name of a file beside it", manifest.data)));
        }
        let saved: Vec<Entry> = manifest.tensors.iter().map(SavedTensor::entry).collect();
        if root(&saved) != manifest.root {
            return Err(unusable("its root digest does not follow from its tensors".into()));
        }
        let mut checked = saved;
        checked.extend(manifest.also_checked.iter().map(CheckedTensor::entry));
        checked.sort_by(|a, b| a.name.cmp(&b.name));
        if root(&checked) != manifest.checked_root {
            return Err(unusable("the root digest of the check does not follow from what was checked".into()));
        }
        Ok(manifest)
    }

    /// Where it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The data file: `VarStore::load` takes it.
    pub fn data_path(&self) -> PathBuf {
        self.path.with_file_name(&self.data)
    }

    /// Whether tensors, such as those of a model that has just loaded the data, are the ones that were saved. Local.
    ///
    /// Every saved tensor has to be among them. Others have to be what was checked when the checkpoint was made
    /// ([`also_checked`](Self::also_checked)), so that adapters cannot be loaded onto another base; those that are not
    /// given are not compared.
    ///
    /// # Errors
    ///
    /// [`SyncError::Checkpoint`] with the first tensor that is missing, unknown, or not the same;
    /// [`SyncError::Tensor`] for one that cannot be hashed.
    pub fn check<T: Into<NamedTensor>>(&self, tensors: impl IntoIterator<Item = T>) -> Result<()> {
        let named: Vec<NamedTensor> = tensors.into_iter().map(Into::into).collect();
        let entries = self.hasher()?.digests(&Method::Sha256, &named)?;
        self.compare(&entries).map_err(|problem| self.error(problem))
    }

    fn compare(&self, found: &[Entry]) -> std::result::Result<(), CheckpointProblem> {
        let found_by_name: BTreeMap<&str, Option<&Content>> =
            found.iter().map(|entry| (entry.name.as_str(), entry.content.as_ref())).collect();
        if let Some(missing) = self.tensors.iter().find(|tensor| !found_by_name.contains_key(tensor.name.as_str())) {
            return Err(CheckpointProblem::Missing { tensor: missing.name.clone() });
        }
        let known: Vec<Entry> = self
            .tensors
            .iter()
            .map(SavedTensor::entry)
            .chain(self.also_checked.iter().map(CheckedTensor::entry))
            .collect();
        let known: BTreeMap<&str, Option<&Content>> =
            known.iter().map(|entry| (entry.name.as_str(), entry.content.as_ref())).collect();
        if let Some(unexpected) = found_by_name.keys().find(|name| !known.contains_key(*name)) {
            return Err(CheckpointProblem::Unexpected { tensor: (*unexpected).to_string() });
        }
        let digest = |content: Option<&Content>| content.map(|content| content.digest);
        let differing: Vec<(&str, Option<&Content>, Option<&Content>)> = found_by_name
            .iter()
            .filter_map(|(name, content)| {
                let saved = known.get(name)?;
                (digest(*saved) != digest(*content)).then_some((*name, *saved, *content))
            })
            .collect();
        match differing.first() {
            None => Ok(()),
            Some((name, saved, found)) => Err(CheckpointProblem::Differs {
                tensor: (*name).to_string(),
                saved: in_words(*saved),
                found: in_words(*found),
                others: differing.len() - 1,
            }),
        }
    }

    /// Whether the data file holds what the manifest says, and nothing else.
    fn verify_data(&self, hasher: &Hasher) -> std::result::Result<(), CheckpointProblem> {
        let file = self.data_path();
        let found = saved::read(&file, hasher, &|| false).map_err(|error| match error {
            ReadError::Io(error) => unreadable(&file, &error),
            ReadError::CutOff(tensor) => CheckpointProblem::CutOff { tensor },
            error => CheckpointProblem::Malformed { file: file.clone(), message: error.to_string() },
        })?;
        // In the file only what was saved may be, not everything that was checked.
        if let Some(unexpected) =
            found.iter().find(|found| !self.tensors.iter().any(|tensor| tensor.name == found.name))
        {
            return Err(CheckpointProblem::Unexpected { tensor: unexpected.name.clone() });
        }
        self.compare(&found.iter().map(SavedTensor::entry).collect::<Vec<_>>())?;
        // Shape and dtype are in the digest; what the manifest says about them beside it has to be the same.
        if let Some((tensor, found)) = self.tensors.iter().zip(&found).find(|(tensor, found)| tensor != found) {
            return Err(CheckpointProblem::Differs {
                tensor: tensor.name.clone(),
                saved: in_words(tensor.entry().content.as_ref()),
                found: in_words(found.entry().content.as_ref()),
                others: 0,
            });
        }
        Ok(())
    }

    fn hasher(&self) -> Result<Hasher> {
        Hasher::new(0)
            .map_err(|error| self.error(CheckpointProblem::Io { file: self.path.clone(), message: error.to_string() }))
    }

    fn error(&self, problem: CheckpointProblem) -> SyncError {
        error(&self.path, problem)
    }
}

/// How often a checkpoint may be replaced while it is read.
const REPLACED: usize = 16;

/// Reads the manifest of a checkpoint and its data, and verifies every tensor of it. Local; needs no session and no
/// model.
///
/// Safetensors files are read in blocks: memory does not limit their size. A checkpoint that is replaced meanwhile is
/// read again.
///
/// # Errors
///
/// [`SyncError::Checkpoint`], which names the tensor that is not the one saved, is missing, cut off, or was never saved.
pub fn verify_checkpoint(manifest: impl AsRef<Path>) -> Result<Manifest> {
    let path = manifest.as_ref();
    let mut manifest = Manifest::read(path)?;
    let hasher = manifest.hasher()?;
    for _ in 0..REPLACED {
        let Err(problem) = manifest.verify_data(&hasher) else { return Ok(manifest) };
        // A commit deletes the data of the checkpoint that it replaces.
        let now = Manifest::read(path)?;
        if now == manifest {
            return Err(manifest.error(problem));
        }
        manifest = now;
    }
    Err(manifest.error(CheckpointProblem::Manifest { message: "it is replaced faster than it can be read".into() }))
}

fn error(manifest: &Path, problem: CheckpointProblem) -> SyncError {
    SyncError::Checkpoint(Box::new(CheckpointError { manifest: manifest.into(), problem }))
}

fn unreadable(file: &Path, error: &io::Error) -> CheckpointProblem {
    CheckpointProblem::Io { file: file.into(), message: error.to_string() }
}

/// What stands under a name, in words.
pub(crate) fn in_words(content: Option<&Content>) -> String {
    match content {
        Some(content) => format!("{} sha256 {}", content.kind, content.digest),
        None => "no tensor".into(),
    }
}
