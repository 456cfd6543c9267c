//! The [`Communicator`]: ranks that have found each other, with a control group for agreements and a data group for
//! tensors, and what is left to do when one of them fails.

pub(crate) mod agreement;
pub(crate) mod c10d;
pub(crate) mod deadline;
mod rendezvous;
mod store;

use std::thread;
use std::time::{Duration, Instant};

pub(crate) use self::rendezvous::{ConnectOptions, connect};
pub use self::rendezvous::{InProcess, Rendezvous};

use self::agreement::{Exchanger, Frame, Merged, tensor_of};
use self::c10d::{Group, Store};
use self::deadline::Deadline;
use self::store::BoundedStore;
use crate::error::{EngineError, Position};

/// What a store call after a failure may take, before the store counts as lost.
const STORE_PATIENCE: Duration = Duration::from_millis(500);
/// How long works in flight may take to end after their connections were closed. They need milliseconds.
const DRAIN: Duration = Duration::from_secs(1);

/// Connected ranks.
pub(crate) struct Communicator {
    rank: usize,
    world_size: usize,
    exchanger: Exchanger,
    control: Group,
    data: Group,
    /// A connection of its own, used only after a failure.
    post_mortem: BoundedStore,
    /// Rank 0 hosts the store in here, unless a launcher does. Dropped last: peers may still ask it.
    _store: Store,
}

/// What could be learned after a failure.
#[derive(Debug, Default)]
pub(crate) struct PostMortem {
    pub(crate) missing: Vec<usize>,
    pub(crate) reported: Vec<(usize, Position)>,
    pub(crate) store_lost: bool,
}

impl Communicator {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    /// The group that moves tensors.
    pub(crate) fn data(&mut self) -> &mut Group {
        &mut self.data
    }

    /// Collective, over the control group.
    pub(crate) fn agree(&mut self, frame: Frame, deadline: &Deadline) -> Result<Merged, EngineError> {
        self.exchanger.agree(&mut self.control, frame, deadline)
    }

    /// Collective, over the control group: replaces `bytes`, whose length has been agreed, by the OR over all ranks.
    pub(crate) fn or(&mut self, bytes: &mut [u8], deadline: &Deadline) -> Result<(), EngineError> {
        self.exchanger.or(&mut self.control, bytes, deadline)
    }

    /// Collective, over the control group: every rank's bytes, of whatever length, in the order of ranks.
    pub(crate) fn gather(&mut self, bytes: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>, EngineError> {
        // A maximum by OR: each rank sets the bit of the power of two that its message fits into.
        let framed = 8 + bytes.len();
        let mut classes = (1_u64 << framed.next_power_of_two().trailing_zeros()).to_le_bytes();
        self.or(&mut classes, deadline)?;
        let slot = 1_usize << u64::from_le_bytes(classes).ilog2();
        let total =
            slot.checked_mul(self.world_size).ok_or_else(|| EngineError::other("details too large to gather"))?;

        let mut message = vec![0; slot];
        message[..8].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        message[8..framed].copy_from_slice(bytes);
        let mut input = tensor_of(slot)?;
        c10d::write_bytes(&mut input, &message)?;
        let output = tensor_of(total)?;
        let ticket = self.control.all_gather(&output, &input, deadline.remaining())?;
        self.control.wait(ticket, deadline.remaining())?;
        c10d::bytes(&output)?
            .chunks_exact(slot)
            .map(|slot| {
                let mut length = [0; 8];
                length.copy_from_slice(&slot[..8]);
                usize::try_from(u64::from_le_bytes(length))
                    .ok()
                    .and_then(|length| slot.get(8..8 + length))
                    .map(<[u8]>::to_vec)
                    .ok_or_else(|| EngineError::other("a rank sent a malformed message"))
            })
            .collect()
    }

    /// Collective, over the control group: replaces `bytes`, whose length has been agreed, by those of `root`.
    pub(crate) fn broadcast_bytes(
        &mut self,
        bytes: &mut [u8],
        root: usize,
        deadline: &Deadline,
    ) -> Result<(), EngineError> {
        let root = u32::try_from(root).map_err(|_| EngineError::other("too many ranks"))?;
        let mut tensor = tensor_of(bytes.len())?;
        c10d::write_bytes(&mut tensor, bytes)?;
        let ticket = self.control.broadcast(&tensor, root, deadline.remaining())?;
        self.control.wait(ticket, deadline.remaining())?;
        bytes.copy_from_slice(c10d::bytes(&tensor)?);
        Ok(())
    }

    /// Closes both groups, so that peers fail in milliseconds, and waits until nothing is in flight any more.
    pub(crate) fn abort(&mut self) {
        // Both first: a peer that waits on one of them should not have to wait for the other to drain.
        self.control.abort();
        self.data.abort();
        let deadline = Deadline::after(DRAIN);
        let running = self.control.drain(deadline.remaining()) + self.data.drain(deadline.remaining());
        if running > 0 {
            tracing::error!(running, "works are still running after their connections were closed");
        }
    }

    /// Tells the others where this rank was when it failed, and learns within `grace` where they were.
    pub(crate) fn post_mortem(&self, position: &Position, grace: Duration) -> PostMortem {
        let mut learned = PostMortem {
            missing: (0..self.world_size).filter(|rank| *rank != self.rank).collect(),
            ..PostMortem::default()
        };
        if let Err(error) = self.exchange_positions(position, grace, &mut learned) {
            // The host may have told its own end before it went: what was learned until then stays.
            tracing::warn!(%error, "the store could not be asked who is missing");
            learned.store_lost = true;
        }
        learned.reported.sort_by_key(|(rank, _)| *rank);
        learned
    }

    fn exchange_positions(
        &self,
        position: &Position,
        grace: Duration,
        learned: &mut PostMortem,
    ) -> Result<(), EngineError> {
        let text = serde_json::to_vec(position).map_err(|error| EngineError::other(error.to_string()))?;
        let own = format!("failed/{}", self.rank);
        self.post_mortem.call(STORE_PATIENCE, move |store| store.set(&own, &text))?;
        let start = Instant::now();
        loop {
            for rank in learned.missing.clone() {
                let key = format!("failed/{rank}");
                let answer = self.post_mortem.call(STORE_PATIENCE, move |store| {
                    if store.has(&key)? { store.get(&key).map(Some) } else { Ok(None) }
                })?;
                if let Some(position) = answer.and_then(|text| serde_json::from_slice(&text).ok()) {
                    learned.missing.retain(|other| *other != rank);
                    learned.reported.push((rank, position));
                }
            }
            if learned.missing.is_empty() || start.elapsed() >= grace {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[cfg(feature = "raw-engine")]
impl Communicator {
    pub(crate) fn control(&mut self) -> &mut Group {
        &mut self.control
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // A work that is still in flight here belongs to a call that failed or panicked.
        if self.control.outstanding() + self.data.outstanding() > 0 {
            self.abort();
        }
    }
}
