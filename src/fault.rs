//! Test-only: places at which a test makes a rank stop, die, panic or fail. Compiled only with the feature
//! `fault-injection`, which nothing turns on by itself; without it a session holds no hook and no point does anything.

#![forbid(unsafe_code)]

/// A place in an operation.
#[cfg_attr(not(feature = "fault-injection"), allow(unreachable_pub))] // Exported with the feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Point {
    /// A call has begun; nothing was sent.
    CallEntered,
    /// An exchange has posted its receives and sent nothing.
    ExchangePosted,
    /// A round of an exchange has sent and not yet received.
    ExchangeSent,
    /// An exchange is complete.
    ExchangeDone,
    /// A bucket's collectives are posted and not waited for.
    DataPosted,
    /// A bucket's collectives are complete, and not yet unpacked.
    DataDone,
    /// Rank 0's writer has returned; what it wrote has not been read back.
    CommitWritten,
    /// What was written is on disk and equals what was checked; its name is still temporary.
    CommitVerified,
    /// The data has its name; the manifest does not name it.
    CommitDataRenamed,
    /// The manifest names the new data; the other ranks have not been told.
    CommitManifestRenamed,
    /// A call's work is complete; it is about to return.
    CallLeaving,
}

/// What happens at a point. Returning `false` makes the call fail there, as if the engine had.
#[cfg(feature = "fault-injection")]
pub type Hook = std::sync::Arc<dyn Fn(Point) -> bool + Send + Sync>;

/// The hook of a session, if the feature is on and a test has set one.
#[derive(Clone, Default)]
pub(crate) struct Faults {
    #[cfg(feature = "fault-injection")]
    hook: Option<Hook>,
}

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faults")
    }
}

impl Faults {
    #[cfg(feature = "fault-injection")]
    pub(crate) fn with_hook(hook: Hook) -> Self {
        Self { hook: Some(hook) }
    }

    #[cfg(feature = "fault-injection")]
    pub(crate) fn reach(&self, point: Point) -> Result<(), crate::error::EngineError> {
        match &self.hook {
            Some(hook) if !hook(point) => {
                Err(crate::error::EngineError::other(format!("injected failure at {point:?}")))
            }
            _ => Ok(()),
        }
    }

    #[cfg(not(feature = "fault-injection"))]
    #[inline]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps)] // The shape of the real one.
    pub(crate) fn reach(&self, _point: Point) -> Result<(), crate::error::EngineError> {
        Ok(())
    }
}
