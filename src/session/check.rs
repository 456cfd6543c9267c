//! `assert_rank_equal`.

use tracing::info_span;

use super::{During, Failure, SyncSession};
use crate::collective::agreement::Field;
use crate::consistency::digest::{Hasher, Method, root};
use crate::consistency::{Digest, DigestAlgorithm, Verified, compare, decode, encode};
use crate::error::{EngineError, Operation, Result, Stage, SyncError, TensorError};
use crate::parameters::NamedTensor;

impl SyncSession {
    /// Checks that all ranks hold the same: names, presence, shapes, dtypes and every byte. Collective.
    ///
    /// Each rank hashes its tensors, and one small exchange compares the digest over all of them, whatever their number.
    /// Takes any named tensors, on any device, in any order and with any strides: parameters, buffers, the frozen base,
    /// optimizer state that the caller holds. An absent one (`None`) equals only an absent one. `phase` is for people,
    /// and must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`SyncError::RanksDiffer`] with what differs, the same on every rank; [`SyncError::Refused`] for an undefined,
    /// sparse, quantized or meta tensor or a name that occurs twice, on any rank; [`SyncError::Desynchronized`],
    /// [`SyncError::Interrupted`] and [`SyncError::Poisoned`] as everywhere.
    pub fn assert_rank_equal<T: Into<NamedTensor>>(
        &mut self,
        tensors: impl IntoIterator<Item = T>,
        phase: &str,
    ) -> Result<Verified> {
        self.assert_rank_equal_with(self.options.digest, tensors, phase)
    }

    /// As [`assert_rank_equal`](Self::assert_rank_equal), by another algorithm than the builder's for this once.
    /// Collective.
    ///
    /// # Errors
    ///
    /// As [`assert_rank_equal`](Self::assert_rank_equal); [`SyncError::Desynchronized`] also if ranks bring different
    /// algorithms.
    pub fn assert_rank_equal_with<T: Into<NamedTensor>>(
        &mut self,
        algorithm: DigestAlgorithm,
        tensors: impl IntoIterator<Item = T>,
        phase: &str,
    ) -> Result<Verified> {
        let tensors: Vec<NamedTensor> = tensors.into_iter().map(Into::into).collect();
        self.run(Operation::AssertRankEqual, None, Some(phase), |session, call| {
            call.content = algorithm.name();
            let hashed = {
                let _entered = info_span!("digest", %algorithm, tensors = tensors.len()).entered();
                let method = Method::new(algorithm, &session.secret, call.at.call);
                session.hasher().during(Stage::Local)?.digests(&method, &tensors)
            };
            let (entries, refusal) = match hashed {
                Ok(entries) => (entries, None),
                Err(error) => (Vec::new(), Some::<TensorError>(error)),
            };
            let own: Digest = root(&entries);
            let frame = session.frame(call).content(algorithm.code()).root(own.as_bytes());
            let merged = session.agree(call, frame, refusal.as_ref())?;
            if merged.agrees(Field::Root) {
                return Ok(Verified::new(session.identity, call.at.call, phase, algorithm, own, entries));
            }
            let bytes = encode(&entries).during(Stage::Local)?;
            let gathered = session.communicator.gather(&bytes, &call.deadline).during(Stage::Details)?;
            let by_rank = gathered
                .iter()
                .map(|bytes| decode(bytes))
                .collect::<std::result::Result<Vec<_>, _>>()
                .during(Stage::Details)?;
            let mut report = compare(call.at.clone(), algorithm, &by_rank);
            session.locate(call, &tensors, &by_rank, &mut report)?;
            Err(Failure::Verdict(SyncError::RanksDiffer(Box::new(report))))
        })
    }

    /// The threads to hash on, started at the first check.
    pub(super) fn hasher(&mut self) -> std::result::Result<&Hasher, EngineError> {
        if self.hasher.is_none() {
            let hasher = Hasher::new(self.options.threads).map_err(|error| EngineError::other(error.to_string()))?;
            self.hasher = Some(hasher);
        }
        self.hasher.as_ref().ok_or_else(|| EngineError::other("no threads to hash on"))
    }
}
