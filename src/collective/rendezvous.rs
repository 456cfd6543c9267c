//! How ranks find each other: a store, a claim for each rank, then two full meshes. All of it under one deadline.

#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::Communicator;
use super::agreement::Exchanger;
use super::c10d::{self, Group, NetworkDevice, Store};
use super::deadline::Deadline;
use super::store::BoundedStore;
use crate::error::{ConnectError, ConnectProblem, ConnectStage, EngineError, EngineErrorKind, SyncError};
use crate::fault::Faults;

/// Where ranks meet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rendezvous {
    /// A TCP store at `host:port`, hosted by rank 0 or, with `hosted_elsewhere`, by somebody else, such as torchrun's
    /// agent.
    Tcp {
        /// Name or address of the host.
        host: String,
        /// The port. Rank 0 must be able to bind it.
        port: u16,
        /// Whether the store is there already.
        hosted_elsewhere: bool,
    },
    /// A file that all ranks can reach and lock, on one machine or a network file system. It must not exist before the
    /// first rank comes, and stays behind.
    File(PathBuf),
    /// Ranks that are threads of one process.
    InProcess(InProcess),
}

/// A meeting place for ranks that are threads of one process: clones of one value are one place.
#[derive(Clone)]
pub struct InProcess(Store);

impl InProcess {
    /// A new place.
    ///
    /// # Errors
    ///
    /// [`SyncError::Configuration`] if libtorch cannot make a store.
    pub fn new() -> Result<Self, SyncError> {
        match Store::hash() {
            Ok(store) => Ok(Self(store)),
            Err(error) => Err(SyncError::configuration("in-process rendezvous", error.message())),
        }
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InProcess")
    }
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, .. } => write!(f, "{host}:{port}"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::InProcess(_) => f.write_str("this process"),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ConnectOptions {
    pub(crate) rendezvous: Rendezvous,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Keeps the keys of successive attempts at one store apart.
    pub(crate) attempt: u64,
    pub(crate) interface: Option<String>,
    pub(crate) limit: Duration,
    pub(crate) faults: Faults,
}

/// Connects, within `options.limit`. Collective.
///
/// Runs on a thread of its own, which is left behind if a stopped store host holds it.
pub(crate) fn connect(options: &ConnectOptions) -> Result<Communicator, ConnectError> {
    let deadline = Deadline::after(options.limit);
    let stage = Arc::new(AtomicU8::new(0));
    let (reply, answer) = mpsc::sync_channel(1);
    let attempt =
        Attempt { options: options.clone(), deadline: inner_deadline(options.limit), stage: Arc::clone(&stage) };
    let failed = |problem| ConnectError {
        rank: options.rank,
        world_size: options.world_size,
        stage: STAGES[usize::from(stage.load(Ordering::Relaxed)).min(STAGES.len() - 1)],
        waited: deadline.waited(),
        limit: options.limit,
        problem,
    };
    thread::Builder::new()
        .name("sft-sync-connect".into())
        .spawn(move || {
            // If the caller has given up, the result is dropped here.
            let _ = reply.send(attempt.run());
        })
        .map_err(|error| failed(ConnectProblem::Engine(EngineError::other(error.to_string()))))?;
    match answer.recv_timeout(deadline.remaining()) {
        Ok(result) => result.map_err(failed),
        Err(RecvTimeoutError::Timeout) => Err(failed(ConnectProblem::Store {
            address: options.rendezvous.to_string(),
            source: EngineError::timeout(
                "no answer by the deadline; is rank 0 started and not stopped, and are host and port right?",
            ),
        })),
        Err(RecvTimeoutError::Disconnected) => {
            Err(failed(ConnectProblem::Engine(EngineError::other("the connecting thread has panicked"))))
        }
    }
}

const STAGES: [ConnectStage; 4] =
    [ConnectStage::Library, ConnectStage::Store, ConnectStage::Rendezvous, ConnectStage::Mesh];

/// A little less than the caller's, so that the better explained error comes first.
fn inner_deadline(limit: Duration) -> Deadline {
    Deadline::after(limit.saturating_sub((limit / 10).min(Duration::from_secs(1))))
}

struct Attempt {
    options: ConnectOptions,
    deadline: Deadline,
    stage: Arc<AtomicU8>,
}

impl Attempt {
    fn enter(&self, stage: ConnectStage) {
        let index = STAGES.iter().position(|other| *other == stage).unwrap_or(0);
        self.stage.store(u8::try_from(index).unwrap_or(0), Ordering::Relaxed);
    }

    fn run(&self) -> Result<Communicator, ConnectProblem> {
        self.enter(ConnectStage::Library);
        check_library()?;
        loop {
            match self.try_once() {
                // A store that goes away while ranks gather is one of an earlier session, whose host is about to host
                // the new one.
                Err(ConnectProblem::Store { source, .. })
                    if source.kind() == EngineErrorKind::ConnectionLost
                        && !self.hosts_store()
                        && !self.deadline.passed() =>
                {
                    thread::sleep(Duration::from_millis(50));
                }
                result => return result,
            }
        }
    }

    fn hosts_store(&self) -> bool {
        match &self.options.rendezvous {
            Rendezvous::Tcp { hosted_elsewhere, .. } => self.options.rank == 0 && !hosted_elsewhere,
            Rendezvous::File(_) | Rendezvous::InProcess(_) => false,
        }
    }

    fn try_once(&self) -> Result<Communicator, ConnectProblem> {
        self.enter(ConnectStage::Store);
        let store = self.open(self.hosts_store())?;
        let post_mortem = self.open(false)?;
        self.enter(ConnectStage::Rendezvous);
        self.meet(&store)?;
        self.enter(ConnectStage::Mesh);
        let control = self.group(&store, "control")?;
        let data = self.group(&store, "data")?;
        Ok(Communicator {
            rank: self.options.rank,
            world_size: self.options.world_size,
            exchanger: Exchanger::new(self.options.rank, self.options.world_size, self.options.faults.clone()),
            control,
            data,
            post_mortem: BoundedStore::new(post_mortem).map_err(ConnectProblem::Engine)?,
            _store: store,
        })
    }

    fn store_problem(&self, source: EngineError) -> ConnectProblem {
        ConnectProblem::Store { address: self.options.rendezvous.to_string(), source }
    }

    fn open(&self, host_it: bool) -> Result<Store, ConnectProblem> {
        let root = match &self.options.rendezvous {
            Rendezvous::Tcp { host, port, .. } => Store::tcp(host, *port, host_it, self.deadline.remaining()),
            Rendezvous::File(path) => match path.to_str() {
                Some(path) => Store::file(path),
                None => Err(EngineError::other("the path is not UTF-8")),
            },
            Rendezvous::InProcess(place) => Ok(place.0.clone()),
        };
        root.and_then(|root| {
            let store = root.prefixed(&format!("sft_sync/{}", self.options.attempt))?;
            store.set_timeout(self.deadline.remaining())?;
            Ok(store)
        })
        .map_err(|source| self.store_problem(source))
    }

    /// Claims this rank, and waits until all have come or one has called it off.
    fn meet(&self, store: &Store) -> Result<(), ConnectProblem> {
        let ConnectOptions { rank, world_size, .. } = self.options;
        let lost = |source| self.store_problem(source);
        let first = store.set_once("world_size", world_size.to_string().as_bytes()).map_err(lost)?;
        let first = String::from_utf8_lossy(&first).into_owned();
        if first != world_size.to_string() {
            let text = format!("rank {rank} was started for {world_size} ranks, another one for {first}");
            store.set_once("verdict", text.as_bytes()).map_err(lost)?;
            return Err(ConnectProblem::WorldSize { here: world_size, elsewhere: first.parse().unwrap_or(0) });
        }
        // Atomic: of two processes with one rank, exactly one gets 1.
        if store.add(&format!("claim/{rank}"), 1).map_err(lost)? != 1 {
            return Err(ConnectProblem::DuplicateRank { rank });
        }
        let arrived = store.add("arrived", 1).map_err(lost)?;
        if usize::try_from(arrived) == Ok(world_size) {
            store.set_once("verdict", b"go").map_err(lost)?;
        }
        if let Err(error) = store.wait("verdict", self.deadline.remaining()) {
            return Err(match error.kind() {
                EngineErrorKind::Timeout => self.who_is_missing(store),
                _ => lost(error),
            });
        }
        let verdict = store.get("verdict").map_err(lost)?;
        if verdict == b"go" {
            Ok(())
        } else {
            Err(ConnectProblem::CalledOff(String::from_utf8_lossy(&verdict).into_owned()))
        }
    }

    fn who_is_missing(&self, store: &Store) -> ConnectProblem {
        let came = |rank: usize| store.has(&format!("claim/{rank}"));
        let missing: Result<Vec<usize>, EngineError> = (0..self.options.world_size)
            .filter_map(|rank| match came(rank) {
                Ok(true) => None,
                Ok(false) => Some(Ok(rank)),
                Err(error) => Some(Err(error)),
            })
            .collect();
        match missing {
            Ok(missing) => ConnectProblem::Missing { missing },
            Err(error) => self.store_problem(error),
        }
    }

    fn group(&self, store: &Store, name: &str) -> Result<Group, ConnectProblem> {
        let connect = || {
            let store = store.prefixed(name)?;
            let index = |value: usize| u32::try_from(value).map_err(|_| EngineError::other("too many ranks"));
            Group::gloo(
                &store,
                index(self.options.rank)?,
                index(self.options.world_size)?,
                self.deadline.remaining(),
                self.network_device(),
            )
        };
        connect().map_err(ConnectProblem::Engine)
    }

    /// Ranks that meet on the loopback address, or inside one process, talk over it too: the engine's own choice, the
    /// address that the machine's name resolves to, may be one that a firewall closes.
    fn network_device(&self) -> NetworkDevice<'_> {
        let loopback = match &self.options.rendezvous {
            Rendezvous::InProcess(_) => Some("127.0.0.1"),
            Rendezvous::Tcp { host, .. } => match host.as_str() {
                "localhost" | "127.0.0.1" => Some("127.0.0.1"),
                "::1" => Some("::1"),
                _ => None,
            },
            Rendezvous::File(_) => None,
        };
        let interface = self.options.interface.as_deref();
        NetworkDevice { interface, hostname: if interface.is_none() { loopback } else { None } }
    }
}

fn check_library() -> Result<(), ConnectProblem> {
    let (compiled, loaded) = c10d::abi_versions();
    if compiled == loaded {
        return Ok(());
    }
    Err(ConnectProblem::LibraryVersion { compiled: version(compiled), loaded: version(loaded) })
}

/// `TORCH_ABI_VERSION` holds major, minor and patch in its three highest bytes.
fn version(abi: u64) -> String {
    let [major, minor, patch, ..] = abi.to_be_bytes();
    format!("{major}.{minor}.{patch}")
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn versions_are_read_from_the_highest_bytes() {
        assert_eq!(version((2 << 56) | (13 << 48) | (1 << 40)), "2.13.1");
    }
}
