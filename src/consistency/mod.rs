//! Whether replicas are equal: digests, their comparison, and the token that proves it.

#![forbid(unsafe_code)]

pub(crate) mod digest;
pub(crate) mod draft;
pub(crate) mod manifest;
mod saved;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use self::digest::{Content, Entry};
pub use self::digest::{Digest, DigestAlgorithm, tensor_digest};
pub use self::manifest::{CheckedTensor, Manifest, SavedTensor, manifest_path, verify_checkpoint};
use crate::error::{Divergence, EngineError, Position, TensorDivergence, sides};

/// Proof that all ranks held the same tensors at one moment.
///
/// Made by [`assert_rank_equal`](crate::SyncSession::assert_rank_equal) only; holds the digests that were compared. Spent
/// by [`commit_checkpoint`](crate::SyncSession::commit_checkpoint), in the session that made it, as long as that has made
/// no later check.
#[must_use = "a checkpoint should be written only with the proof that the replicas were equal"]
#[derive(Debug)]
pub struct Verified {
    /// Of the session that made it.
    session: u64,
    call: u64,
    phase: String,
    algorithm: DigestAlgorithm,
    root: Digest,
    entries: Vec<Entry>,
}

impl Verified {
    pub(crate) fn new(
        session: u64,
        call: u64,
        phase: &str,
        algorithm: DigestAlgorithm,
        root: Digest,
        entries: Vec<Entry>,
    ) -> Self {
        Self { session, call, phase: phase.to_string(), algorithm, root, entries }
    }

    /// The identity of the session that made it.
    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    /// What was checked, in name order.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// What the digests were made with. Those of a fingerprint mean nothing outside this check.
    pub fn algorithm(&self) -> DigestAlgorithm {
        self.algorithm
    }

    /// The digest over all names and digests: SHA-256, whatever the algorithm of the digests is.
    pub fn root(&self) -> Digest {
        self.root
    }

    /// The number of the check among the session's calls.
    pub fn call(&self) -> u64 {
        self.call
    }

    /// The phase that the check was made for.
    pub fn phase(&self) -> &str {
        &self.phase
    }

    /// Each name with its digest (`None`: absent on every rank), in name order.
    pub fn digests(&self) -> impl Iterator<Item = (&str, Option<Digest>)> {
        self.entries.iter().map(|entry| (entry.name.as_str(), entry.content.as_ref().map(|content| content.digest)))
    }
}

/// An entry as it travels when ranks differ.
#[derive(Serialize, Deserialize)]
struct Travelling {
    name: String,
    /// Digest in hexadecimal, and dtype and shape.
    content: Option<(String, String)>,
}

pub(crate) fn encode(entries: &[Entry]) -> Result<Vec<u8>, EngineError> {
    let travelling: Vec<Travelling> = entries
        .iter()
        .map(|entry| Travelling {
            name: entry.name.clone(),
            content: entry.content.as_ref().map(|content| (content.digest.to_string(), content.kind.clone())),
        })
        .collect();
    serde_json::to_vec(&travelling).map_err(|error| EngineError::other(error.to_string()))
}

pub(crate) fn decode(bytes: &[u8]) -> Result<Vec<Entry>, EngineError> {
    let malformed = || EngineError::other("a rank sent malformed digests");
    let travelling: Vec<Travelling> = serde_json::from_slice(bytes).map_err(|_| malformed())?;
    travelling
        .into_iter()
        .map(|Travelling { name, content }| {
            let content = match content {
                Some((digest, kind)) => {
                    Some(Content { digest: Digest::from_hex(&digest).ok_or_else(malformed)?, kind })
                }
                None => None,
            };
            Ok(Entry { name, content })
        })
        .collect()
}

/// What differs, from every rank's entries in the order of ranks. The same on every rank, since all hold the same.
///
/// A name that a rank did not list is not the same as an explicitly absent tensor under that name.
pub(crate) fn compare(at: Position, algorithm: DigestAlgorithm, by_rank: &[Vec<Entry>]) -> Divergence {
    let maps: Vec<BTreeMap<&str, Option<&Content>>> = by_rank
        .iter()
        .map(|entries| entries.iter().map(|entry| (entry.name.as_str(), entry.content.as_ref())).collect())
        .collect();
    let names: BTreeSet<&str> = maps.iter().flat_map(|map| map.keys().copied()).collect();
    let tensors = names
        .iter()
        .filter_map(|name| {
            let held: Vec<Option<&Content>> = maps.iter().map(|map| map.get(name).copied().flatten()).collect();
            if held.iter().all(|content| *content == held[0]) && maps.iter().all(|map| map.contains_key(name)) {
                return None;
            }
            let sides = sides(maps.iter().map(|map| match map.get(name) {
                Some(Some(content)) => format!("{} {algorithm} {}", content.kind, content.digest),
                Some(None) => "no tensor".into(),
                None => "nothing under that name".into(),
            }));
            let majority = sides.iter().position(|side| side.ranks.len() * 2 > by_rank.len());
            Some(TensorDivergence { name: (*name).to_string(), sides, majority })
        })
        .collect();
    Divergence { at, compared: names.len(), tensors, first: None }
}
