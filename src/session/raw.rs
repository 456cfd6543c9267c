//! The engine without the crate around it: what benches compare with, and counts of torch's allocations. Compiled only
//! with the feature `raw-engine`.

use std::time::Duration;

use tch::Tensor;

use super::SyncSession;
use crate::collective::agreement::Frame;
use crate::collective::c10d;
use crate::collective::deadline::Deadline;
use crate::error::{EngineError, Operation};

const PATIENCE: Duration = Duration::from_secs(60);

/// What torch has allocated on the CPU since [`count_allocations`].
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocations {
    /// Number of allocations.
    pub count: u64,
    /// The most bytes that were held at one time.
    pub peak_bytes: u64,
}

/// Starts counting torch's CPU allocations of this process, from zero. Calling it again starts anew.
#[doc(hidden)]
pub fn count_allocations() -> impl Fn() -> Allocations {
    c10d::start_counting_allocations();
    || {
        let (count, peak_bytes) = c10d::allocations();
        Allocations { count, peak_bytes }
    }
}

#[doc(hidden)]
impl SyncSession {
    /// One `all_reduce` (sum) on the data group.
    pub fn raw_all_reduce(&mut self, tensor: &Tensor) -> Result<(), EngineError> {
        let group = self.communicator.data();
        let ticket = group.all_reduce_sum(tensor, PATIENCE)?;
        group.wait(ticket, PATIENCE)
    }

    /// One broadcast from rank 0 on the data group.
    pub fn raw_broadcast(&mut self, tensor: &Tensor) -> Result<(), EngineError> {
        let group = self.communicator.data();
        let ticket = group.broadcast(tensor, 0, PATIENCE)?;
        group.wait(ticket, PATIENCE)
    }

    /// One all-gather on the data group.
    pub fn raw_all_gather(&mut self, output: &Tensor, input: &Tensor) -> Result<(), EngineError> {
        let group = self.communicator.data();
        let ticket = group.all_gather(output, input, PATIENCE)?;
        group.wait(ticket, PATIENCE)
    }

    /// c10d's barrier on the control group.
    pub fn raw_barrier(&mut self) -> Result<(), EngineError> {
        let group = self.communicator.control();
        let ticket = group.barrier(PATIENCE)?;
        group.wait(ticket, PATIENCE)
    }

    /// One agreement, and nothing else.
    pub fn raw_agreement(&mut self) -> Result<(), EngineError> {
        let frame = Frame::new(Operation::AllAgree, 0);
        self.communicator.agree(frame, &Deadline::after(PATIENCE)).map(drop)
    }
}
