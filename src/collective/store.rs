//! Store calls that cannot hold their caller.
//!
//! A TCP store ignores its timeout while the process that hosts it is stopped, so only a thread that can be left behind
//! bounds a call.

#![forbid(unsafe_code)]

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::c10d::Store;
use crate::error::EngineError;

type Job = Box<dyn FnOnce(&Store) + Send>;

/// A store with a thread of its own, on which its calls run.
pub(crate) struct BoundedStore {
    jobs: mpsc::Sender<Job>,
}

impl BoundedStore {
    pub(crate) fn new(store: Store) -> Result<Self, EngineError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new()
            .name("sft-sync-store".into())
            .spawn(move || {
                // Ends when the handle is dropped; if a call is stuck by then, when that call ends.
                for job in queue {
                    job(&store);
                }
            })
            .map_err(|error| EngineError::other(format!("no thread for the store: {error}")))?;
        Ok(Self { jobs })
    }

    /// Runs `call` on the store's thread and waits for it for at most `timeout`.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        timeout: Duration,
        call: impl FnOnce(&Store) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let (reply, answer) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |store| {
            // The caller may have given up waiting; then nobody wants the answer.
            let _ = reply.send(call(store));
        });
        self.jobs.send(job).map_err(|_| EngineError::other("the store's thread has ended"))?;
        match answer.recv_timeout(timeout) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                Err(EngineError::timeout(format!("the store did not answer within {timeout:.1?}")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(EngineError::other("the store's thread has ended")),
        }
    }
}
