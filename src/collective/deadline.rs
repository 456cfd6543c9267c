//! One deadline for a whole call (invariant I10).

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// When a call has to have returned. Every wait inside gets what remains of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { start: Instant::now(), limit }
    }

    /// What remains; never less than a millisecond, because 0 means "for ever" in c10d.
    pub(crate) fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed()).max(Duration::from_millis(1))
    }

    pub(crate) fn passed(&self) -> bool {
        self.start.elapsed() >= self.limit
    }

    pub(crate) fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }
}
