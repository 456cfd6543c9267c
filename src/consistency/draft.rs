//! A checkpoint in the making, on the rank that writes it: temporary names, read-back, and the renames whose last one is
//! the commit point.

#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher as _, RandomState};
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use super::Verified;
use super::digest::{Content, Digest, Entry, Hasher, root};
use super::manifest::{Facts, Manifest, SavedTensor, in_words, manifest_path};
use super::saved::{self, ReadError};
use crate::error::{CheckpointProblem, CommitProblem, EngineError};

/// Why a step of the making ended early.
pub(crate) enum Stop {
    /// All ranks will be told, and go on.
    Problem(CommitProblem),
    /// The deadline has passed: so it has for the others.
    Late(EngineError),
}

impl From<CommitProblem> for Stop {
    fn from(problem: CommitProblem) -> Self {
        Self::Problem(problem)
    }
}

/// A checkpoint that is being made. Dropped, it takes away whatever of it no manifest names.
pub(crate) struct Draft {
    folder: PathBuf,
    stem: String,
    /// With its dot; empty if there is none.
    extension: String,
    manifest: PathBuf,
    /// The writer's file, and later the manifest's.
    temporary: Vec<PathBuf>,
    /// The data file under its last name.
    data: Option<PathBuf>,
}

impl Draft {
    /// Local; creates nothing.
    pub(crate) fn open(path: &Path) -> Result<Self, CommitProblem> {
        let refuse =
            |problem: &str| CommitProblem::Path { path: path.display().to_string(), problem: problem.to_string() };
        // Names go into the manifest and to the other ranks, as text.
        if path.to_str().is_none() {
            return Err(refuse("it is not UTF-8"));
        }
        let part = |part: Option<&std::ffi::OsStr>| part.and_then(|part| part.to_str()).map(String::from);
        let stem = part(path.file_stem()).ok_or_else(|| refuse("it has no file name"))?;
        let extension = part(path.extension()).map(|extension| format!(".{extension}")).unwrap_or_default();
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder.to_path_buf(),
            _ => PathBuf::from("."),
        };
        if !folder.is_dir() {
            return Err(refuse("its folder does not exist"));
        }
        Ok(Self { folder, stem, extension, manifest: manifest_path(path), temporary: Vec::new(), data: None })
    }

    pub(crate) fn manifest(&self) -> &Path {
        &self.manifest
    }

    /// Lets the caller write under a temporary name.
    pub(crate) fn write<T, E: Display>(
        &mut self,
        writer: impl FnOnce(&Path) -> Result<T, E>,
    ) -> Result<(), CommitProblem> {
        let file = self.temporary_name(&self.extension);
        self.temporary.push(file.clone());
        match catch_unwind(AssertUnwindSafe(|| writer(&file).map(drop))) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                // The alternate form, because some error types tell their causes in it. Without the C++ stack trace that
                // libtorch appends.
                let text = format!("{error:#}");
                Err(CommitProblem::Writer { message: text.split("\nframe #").next().unwrap_or_default().to_string() })
            }
            Err(panic) => Err(CommitProblem::WriterPanicked { message: message(panic.as_ref()) }),
        }
    }

    /// Brings what was written to the disk, reads it back, and matches it with the token.
    pub(crate) fn verify(
        &self,
        verified: &Verified,
        hasher: &Hasher,
        late: &(dyn Fn() -> bool + Sync),
    ) -> Result<(Vec<SavedTensor>, Digest), Stop> {
        let unreadable = |message: String| CommitProblem::Unreadable { message };
        let file = self.temporary.first().ok_or_else(|| unreadable("nothing was written".into()))?;
        // Neither a link out of the folder nor a device: what is renamed later has to be what was read.
        match fs::symlink_metadata(file) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err(unreadable("it is not a file".into()).into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(unreadable("the writer made no file under the name that it was given".into()).into());
            }
            Err(error) => return Err(failed("looking at what was written", &error).into()),
        }
        sync(file).map_err(|error| failed("bringing the data to the disk", &error))?;
        let tensors = saved::read(file, hasher, late).map_err(|error| match error {
            ReadError::Late => Stop::Late(EngineError::timeout("reading back what was written took too long")),
            error => unreadable(error.to_string()).into(),
        })?;
        compare(verified.entries(), &tensors)?;
        let entries: Vec<Entry> = tensors.iter().map(SavedTensor::entry).collect();
        Ok((tensors, root(&entries)))
    }

    /// The name of the data of a root.
    pub(crate) fn data_path(&self, root: &Digest) -> PathBuf {
        let name = format!("{}-{}{}", self.stem, &root.to_string()[..16], self.extension);
        self.folder.join(name)
    }

    /// Gives the data its name, and lays the manifest ready, both on the disk.
    pub(crate) fn place(&mut self, facts: Facts<'_>) -> Result<(), CommitProblem> {
        let data = self.folder.join(&facts.data);
        let manifest = Manifest::new(&self.manifest, facts);
        let text = serde_json::to_vec_pretty(&manifest)
            .map_err(|error| failed("writing the manifest", &io::Error::other(error)))?;
        if let Some(file) = self.temporary.first() {
            fs::rename(file, &data).map_err(|error| failed("renaming the data", &error))?;
        }
        self.temporary.clear();
        self.data = Some(data);

        let ready = self.temporary_name(".json");
        self.temporary.push(ready.clone());
        let write = || -> io::Result<()> {
            let mut file = File::create_new(&ready)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        write().map_err(|error| failed("writing the manifest", &error))?;
        // The name of the data has to last before anything refers to it.
        sync(&self.folder).map_err(|error| failed("bringing the folder to the disk", &error))
    }

    /// The commit point.
    pub(crate) fn publish(&mut self) -> Result<(), CommitProblem> {
        let replaced = Manifest::read_from(&self.manifest).ok().map(|manifest| manifest.data);
        if let Some(ready) = self.temporary.first() {
            fs::rename(ready, &self.manifest).map_err(|error| failed("renaming the manifest", &error))?;
        }
        self.temporary.clear();
        sync(&self.folder)
            .map_err(|error| failed("bringing the folder to the disk, with the new checkpoint in it,", &error))?;
        let data = self.data.take();
        let named = data.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
        if let Some(replaced) = replaced.filter(|replaced| named != Some(replaced.as_str()) && self.is_ours(replaced)) {
            remove(&self.folder.join(replaced));
        }
        Ok(())
    }

    /// Whether a commit to this path could have named a file so: nothing else is ever removed.
    fn is_ours(&self, name: &str) -> bool {
        name.strip_prefix(self.stem.as_str())
            .and_then(|name| name.strip_prefix('-')?.strip_suffix(self.extension.as_str()))
            .is_some_and(|root| root.len() == 16 && root.bytes().all(|byte| byte.is_ascii_hexdigit()))
    }

    fn temporary_name(&self, extension: &str) -> PathBuf {
        // Keyed by the system's random numbers: unique also among hosts that share the folder.
        let random = RandomState::new().build_hasher().finish();
        // Hidden where it can be: torch takes no name whose only dot is its first character.
        let dot = if self.stem.starts_with('.') || extension.is_empty() { "" } else { "." };
        self.folder.join(format!("{dot}{}-{}-{random:016x}-tmp{extension}", self.stem, std::process::id()))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        for file in &self.temporary {
            remove(file);
        }
        // Renaming the manifest may have failed after it was done (a network file system). And a checkpoint with the same
        // tensors, an earlier one, has the same data.
        if let Some(data) = &self.data
            && match Manifest::read_from(&self.manifest) {
                Ok(manifest) => Path::new(&manifest.data).file_name() != data.file_name(),
                // Neither is one that this draft has put there.
                Err(CheckpointProblem::Manifest { .. }) => true,
                Err(_) => matches!(fs::exists(&self.manifest), Ok(false)),
            }
        {
            remove(data);
        }
    }
}

fn compare(checked: &[Entry], written: &[SavedTensor]) -> Result<(), CommitProblem> {
    if written.is_empty() {
        return Err(CommitProblem::Empty);
    }
    let checked: BTreeMap<&str, Option<&Content>> =
        checked.iter().map(|entry| (entry.name.as_str(), entry.content.as_ref())).collect();
    let mut differing: Vec<(&SavedTensor, Option<&Content>)> = Vec::new();
    for tensor in written {
        match checked.get(tensor.name.as_str()) {
            None => return Err(CommitProblem::NotCovered { tensor: tensor.name.clone() }),
            Some(content) if content.map(|content| content.digest) == Some(tensor.sha256) => {}
            Some(content) => differing.push((tensor, *content)),
        }
    }
    match differing.first() {
        None => Ok(()),
        Some((tensor, content)) => Err(CommitProblem::Differs {
            tensor: tensor.name.clone(),
            checked: in_words(*content),
            written: in_words(tensor.entry().content.as_ref()),
            others: differing.len() - 1,
        }),
    }
}

/// Of a file or a folder. Any handle will do: it is the file that is brought to the disk, whoever wrote it.
fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn remove(file: &Path) {
    if let Err(error) = fs::remove_file(file)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(file = %file.display(), %error, "a file could not be removed");
    }
}

fn failed(doing: &str, error: &io::Error) -> CommitProblem {
    CommitProblem::Io { doing: doing.to_string(), message: error.to_string() }
}

fn message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
