//! `commit_checkpoint`: rank 0 makes the checkpoint, step by step, and after each step all ranks meet.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tracing::info_span;

use super::{Call, During, Failure, Outcome, SyncSession};
use crate::collective::agreement::{Field, NO};
use crate::consistency::draft::{Draft, Stop};
use crate::consistency::manifest::Facts;
use crate::consistency::{Digest, DigestAlgorithm, SavedTensor, Verified};
use crate::error::{CommitProblem, CommitRefusal, EngineError, Operation, Position, Result, Stage, SyncError, sides};
use crate::fault::Point;

/// The rank that writes.
const WRITER: usize = 0;

/// A checkpoint that is on disk and is what all ranks were checked to hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Committed {
    /// What a reader opens: [`verify_checkpoint`](crate::verify_checkpoint) takes it. A path of rank 0's host.
    pub manifest: PathBuf,
    /// The file that the writer made, under its last name.
    pub data: PathBuf,
    /// The root digest over the tensors in that file.
    pub root: Digest,
}

/// A step of the making, after which ranks meet.
#[derive(Clone, Copy)]
enum Step {
    Written = 1,
    Verified = 2,
    Placed = 3,
    Published = 4,
}

impl Step {
    fn doing(self) -> &'static str {
        match self {
            Self::Written => "while rank 0 wrote the file",
            Self::Verified => "while rank 0 read the file back",
            Self::Placed => "while rank 0 gave the file its name",
            Self::Published => "while rank 0 renamed the manifest, so that either checkpoint may stand",
        }
    }
}

/// What a rank tells when a commit is refused.
#[derive(Serialize, Deserialize)]
struct Detail {
    at: Position,
    token: String,
    problem: Option<CommitProblem>,
}

impl SyncSession {
    /// Writes a checkpoint that is what all ranks were checked to hold, or leaves the one before. Collective; `writer` is
    /// called on rank 0 only.
    ///
    /// `verified` comes from [`assert_rank_equal`](Self::assert_rank_equal), in this session, with no other check after
    /// it, and by SHA-256, which is what the manifest records. `path` names the checkpoint, on rank 0's host: `run/adapters.safetensors` has the manifest
    /// `run/adapters.safetensors.json` and, beside it, a data file `run/adapters-0123456789abcdef.safetensors`, with the
    /// start of its root digest in its name. Its folder has to exist. Rank 0
    ///
    /// 1. calls `writer` with a temporary name of the same extension (which is what `VarStore::save` chooses the format
    ///    by);
    /// 2. brings the file to the disk, reads it back as `VarStore::load` would, and compares every tensor with the token: a
    ///    step taken after the check, or a tensor that the check did not cover, refuses;
    /// 3. gives the data file its name;
    /// 4. renames the manifest over the one before: **this is the commit**. Until then readers find the checkpoint before,
    ///    from then on the new one, each complete.
    ///
    /// Then the data file of the checkpoint that was replaced is deleted: give a path of its own to a checkpoint that is
    /// to be kept. The file may hold less than what was checked (adapters without their base); the manifest lists what it
    /// holds, and what else was checked. Only one job at a time may commit to a path.
    ///
    /// The ranks meet after each step. The call has a deadline of its own
    /// ([`commit_timeout`](crate::SessionBuilder::commit_timeout)). `writer` itself is not cut short by it: a call in which
    /// `writer` takes longer fails on rank 0 when it returns.
    ///
    /// ```
    /// # use sft_sync::{InProcess, Parameters, Rendezvous, SyncSession, verify_checkpoint};
    /// # use tch::{Device, nn};
    /// # let folder = tempfile::tempdir()?;
    /// # let mut session = SyncSession::builder()
    /// #     .rendezvous(Rendezvous::InProcess(InProcess::new()?)).rank(0).world_size(1).build()?;
    /// let mut store = nn::VarStore::new(Device::Cpu);
    /// let model = nn::linear(store.root() / "model", 4, 1, Default::default());
    ///
    /// let path = folder.path().join("model.safetensors");
    /// let verified = session.assert_rank_equal(Parameters::all(&store)?.values(), "checkpoint")?;
    /// let committed = session.commit_checkpoint(verified, &path, |file| store.save(file))?;
    ///
    /// // Later, and elsewhere:
    /// let manifest = verify_checkpoint(&committed.manifest)?;
    /// store.load(manifest.data_path())?;
    /// manifest.check(Parameters::all(&store)?.values())?;
    /// # drop(model);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Whatever the error, what stands under the path is the checkpoint before or the new one, complete;
    /// [`verify_checkpoint`](crate::verify_checkpoint) tells which.
    ///
    /// [`SyncError::CommitRefused`], the same on every rank, if the token is not right, the writer fails or panics, the
    /// file is not what was checked, or the file system fails (a full disk): the session goes on, and the checkpoint is the
    /// one before, unless the error says otherwise. [`SyncError::Interrupted`] if a rank or a link fails or the deadline
    /// passes; [`SyncError::Desynchronized`] and [`SyncError::Poisoned`] as everywhere.
    pub fn commit_checkpoint<T, E: Display>(
        &mut self,
        verified: Verified,
        path: impl AsRef<Path>,
        writer: impl FnOnce(&Path) -> std::result::Result<T, E>,
    ) -> Result<Committed> {
        let phase = verified.phase().to_string();
        let limit = self.options.commit_timeout;
        self.run_within(limit, Operation::CommitCheckpoint, None, Some(&phase), move |session, call| {
            // Spent here, whatever comes of it.
            let verified = verified;
            session.commit(call, &verified, path.as_ref(), writer)
        })
    }

    fn commit<T, E: Display>(
        &mut self,
        call: &Call,
        verified: &Verified,
        path: &Path,
        writer: impl FnOnce(&Path) -> std::result::Result<T, E>,
    ) -> Outcome<Committed> {
        let mut draft = None;
        let mut problem = self.token_problem(verified);
        if self.rank() == WRITER && problem.is_none() {
            match Draft::open(path) {
                Ok(opened) => draft = Some(opened),
                Err(refused) => problem = Some(refused),
            }
        }
        let token = format!("check {} ({:?}) of {}", verified.call(), verified.phase(), verified.root());
        // The token travels as the root, in which ranks may differ: a wrong token is this call's own error.
        let frame = self.frame(call).phase(0).root(blake3::hash(token.as_bytes()).as_bytes());
        let merged = self.agree(call, frame.flag(NO, problem.is_some()), None)?;
        if merged.any(NO) || !merged.agrees(Field::Root) {
            return Err(self.refuse_commit(call, token, problem));
        }

        let problem = draft.as_mut().and_then(|draft| {
            let _entered = info_span!("write").entered();
            draft.write(writer).err()
        });
        self.meet(call, Step::Written, Point::CommitWritten, &mut draft, problem)?;

        let mut read_back = None;
        let mut problem = None;
        if let Some(draft) = &draft {
            let _entered = info_span!("read_back").entered();
            match draft.verify(verified, self.hasher().during(Stage::Local)?, &|| call.deadline.passed()) {
                Ok(tensors) => read_back = Some(tensors),
                Err(Stop::Problem(stopped)) => problem = Some(stopped),
                Err(Stop::Late(error)) => return Err(Failure::Engine(Stage::Local, error)),
            }
        }
        self.meet(call, Step::Verified, Point::CommitVerified, &mut draft, problem)?;

        let mut planned = None;
        let mut problem = None;
        if let (Some(draft), Some((tensors, root))) = (&mut draft, read_back) {
            let data = draft.data_path(&root);
            problem = draft.place(self.facts(verified, &data, root, tensors)).err();
            planned = Some(Committed { manifest: draft.manifest().to_path_buf(), data, root });
        }
        self.meet(call, Step::Placed, Point::CommitDataRenamed, &mut draft, problem)?;
        // Before the commit, so that only one agreement stands between it and the ranks' knowing of it.
        let planned: Vec<Option<Committed>> = self.gather_json(call, &planned)?;
        let planned = planned.into_iter().flatten().next();
        let planned = planned.ok_or_else(|| EngineError::other("rank 0 sent no checkpoint")).during(Stage::Details)?;

        let problem = draft.as_mut().and_then(|draft| draft.publish().err());
        self.meet(call, Step::Published, Point::CommitManifestRenamed, &mut draft, problem)?;
        tracing::info!(manifest = %planned.manifest.display(), root = %planned.root, "committed");
        Ok(planned)
    }

    fn token_problem(&self, verified: &Verified) -> Option<CommitProblem> {
        if verified.session() != self.identity {
            return Some(CommitProblem::ForeignToken);
        }
        if verified.algorithm() != DigestAlgorithm::Sha256 {
            return Some(CommitProblem::Algorithm { algorithm: verified.algorithm().name().into() });
        }
        let latest = self.latest_check.unwrap_or(0);
        (verified.call() != latest).then(|| CommitProblem::StaleToken { check: verified.call(), latest })
    }

    fn facts<'a>(&self, checked: &'a Verified, data: &Path, root: Digest, tensors: Vec<SavedTensor>) -> Facts<'a> {
        Facts {
            data: data.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            root,
            checked,
            step: self.latest_step,
            world_size: self.world_size(),
            tensors,
        }
    }

    /// Learns whether rank 0 has made its step. The sign of life that the others wait for.
    fn meet(
        &mut self,
        call: &Call,
        step: Step,
        point: Point,
        draft: &mut Option<Draft>,
        problem: Option<CommitProblem>,
    ) -> Outcome<()> {
        if self.rank() == WRITER {
            self.faults.reach(point).during(Stage::Local)?;
        }
        if problem.is_some() {
            // Cleared away before anybody is told.
            *draft = None;
        }
        let frame = self.frame(call).phase(0).bucket(step as u64).flag(NO, problem.is_some());
        let merged = self.agree(call, frame, None).map_err(|failure| match failure {
            Failure::Engine(stage, error) => Failure::Engine(stage, error.context(step.doing())),
            verdict @ Failure::Verdict(_) => verdict,
        })?;
        if merged.any(NO) {
            return Err(self.refuse_commit(call, String::new(), problem));
        }
        Ok(())
    }

    /// Collective, after an agreement that said no: the same refusal on every rank.
    fn refuse_commit(&mut self, call: &Call, token: String, problem: Option<CommitProblem>) -> Failure {
        let own = Detail { at: call.at.clone(), token, problem };
        let details: Vec<Detail> = match self.gather_json(call, &own) {
            Ok(details) => details,
            Err(failure) => return failure,
        };
        let tokens = sides(details.iter().map(|detail| detail.token.clone()));
        let (rank, problem) = details
            .iter()
            .enumerate()
            .find_map(|(rank, detail)| Some((rank, detail.problem.clone()?)))
            .unwrap_or((WRITER, CommitProblem::TokensDiffer { sides: tokens }));
        // With different tokens, phases may differ as well: those of the rank that refused.
        let at = details.into_iter().nth(rank).map_or_else(|| call.at.clone(), |detail| detail.at);
        Failure::Verdict(SyncError::CommitRefused(Box::new(CommitRefusal { at, rank, problem })))
    }
}
