//! Data-parallel SFT synchronization for [`tch`].

mod bucket;
mod collective;
mod consistency;
mod error;
#[cfg(feature = "fault-injection")]
pub mod fault;
#[cfg(not(feature = "fault-injection"))]
mod fault;
mod parameters;
mod session;
mod tensor;

pub use crate::collective::{InProcess, Rendezvous};
pub use crate::consistency::{Digest, Verified, tensor_digest};
pub use crate::error::*;
pub use crate::parameters::{NamedTensor, Parameters};
pub use crate::session::{FencePolicy, SessionBuilder, Summable, SyncReport, SyncSession, Transport};
