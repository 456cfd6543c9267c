//! What a session is built from: [`SessionBuilder`], and the environment that launchers set.

use std::time::Duration;

use tch::Kind;

use super::SyncSession;
use crate::collective::{ConnectOptions, Rendezvous};
use crate::consistency::DigestAlgorithm;
use crate::error::{Result, SyncError};
use crate::fault::Faults;

/// When ranks meet around the movement of data (invariant I2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FencePolicy {
    /// An agreement before every bucket: no rank carries the next bucket into an unfinished collective.
    #[default]
    EveryBucket,
    /// One agreement before the first bucket.
    Step,
}

/// How a bucket travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// Large members where they lie, all in flight at once; small ones packed into one buffer.
    #[default]
    InPlace,
    /// The whole bucket packed into one buffer, as the reference does: the same bits as the reference at any number of
    /// ranks. (A ring adds in an order that depends on where its chunks lie, so with more than two ranks the two
    /// transports differ in the last bits.)
    Flat,
}

/// Options that every operation reads.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) bucket_bytes: usize,
    pub(crate) in_place_bytes: usize,
    pub(crate) transport: Transport,
    pub(crate) fence_policy: FencePolicy,
    pub(crate) reduce_in_float32: bool,
    pub(crate) digest: DigestAlgorithm,
    pub(crate) operation_timeout: Duration,
    pub(crate) commit_timeout: Duration,
    pub(crate) grace: Duration,
    pub(crate) threads: usize,
}

impl Options {
    /// What must be the same on every rank, for the digest that travels and for the report of a difference.
    pub(crate) fn shared(&self) -> Vec<(String, String)> {
        [
            ("sft-sync version", env!("CARGO_PKG_VERSION").to_string()),
            ("bucket_bytes", self.bucket_bytes.to_string()),
            ("in_place_bytes", self.in_place_bytes.to_string()),
            ("transport", format!("{:?}", self.transport)),
            ("fence_policy", format!("{:?}", self.fence_policy)),
            ("reduction_dtype", if self.reduce_in_float32 { "float32".into() } else { "as the gradient".to_string() }),
            ("digest", self.digest.to_string()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into()
    }
}

/// Settings of a session. Made by [`SyncSession::builder`].
///
/// Every setting that the environment may give can be set here; what is set here wins.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct SessionBuilder {
    rendezvous: Option<Rendezvous>,
    rank: Option<usize>,
    world_size: Option<usize>,
    local_rank: Option<usize>,
    attempt: u64,
    interface: Option<String>,
    connect_timeout: Duration,
    options: Options,
    reduction_dtype: Option<Kind>,
    faults: Faults,
}

impl SessionBuilder {
    pub(crate) fn new() -> Self {
        Self {
            rendezvous: None,
            rank: None,
            world_size: None,
            local_rank: None,
            attempt: 0,
            interface: None,
            connect_timeout: Duration::from_secs(300),
            options: Options {
                bucket_bytes: 32 << 20,
                in_place_bytes: 1 << 20,
                transport: Transport::default(),
                fence_policy: FencePolicy::default(),
                reduce_in_float32: false,
                digest: DigestAlgorithm::default(),
                operation_timeout: Duration::from_secs(600),
                commit_timeout: Duration::from_secs(1800),
                grace: Duration::from_millis(500),
                threads: 0,
            },
            reduction_dtype: None,
            faults: Faults::default(),
        }
    }

    /// Takes what launchers set: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
    /// `MASTER_PORT`, `TORCHELASTIC_USE_AGENT_STORE`, `TORCHELASTIC_RESTART_COUNT` and `GLOO_SOCKET_IFNAME`.
    ///
    /// # Errors
    ///
    /// [`SyncError::Configuration`] for a variable that is missing or makes no sense, by name.
    pub(crate) fn with_environment(mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let required = |name: &str| {
            lookup(name).ok_or_else(|| {
                SyncError::configuration(
                    name,
                    "is not set; a launcher such as torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                )
            })
        };
        self.rank = Some(number("RANK", &required("RANK")?)?);
        self.world_size = Some(number("WORLD_SIZE", &required("WORLD_SIZE")?)?);
        if let Some(text) = lookup("LOCAL_RANK") {
            self.local_rank = Some(number("LOCAL_RANK", &text)?);
        }
        if let Some(text) = lookup("TORCHELASTIC_RESTART_COUNT") {
            self.attempt = number("TORCHELASTIC_RESTART_COUNT", &text)?;
        }
        // c10d takes a list here; like it, the first name is used.
        self.interface = lookup("GLOO_SOCKET_IFNAME")
            .and_then(|list| list.split(',').next().map(|name| name.trim().to_string()))
            .filter(|name| !name.is_empty());
        if let Some(text) = lookup("LOCAL_WORLD_SIZE") {
            // Ranks on one host share its cores.
            let ranks: usize = number("LOCAL_WORLD_SIZE", &text)?;
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            self.options.threads = (cores / ranks.max(1)).max(1);
        }
        self.rendezvous = Some(Rendezvous::Tcp {
            host: required("MASTER_ADDR")?,
            port: number("MASTER_PORT", &required("MASTER_PORT")?)?,
            hosted_elsewhere: lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True"),
        });
        Ok(self)
    }

    /// Where ranks meet.
    pub fn rendezvous(mut self, rendezvous: Rendezvous) -> Self {
        self.rendezvous = Some(rendezvous);
        self
    }

    /// This rank, counted from 0.
    pub fn rank(mut self, rank: usize) -> Self {
        self.rank = Some(rank);
        self
    }

    /// The number of ranks.
    pub fn world_size(mut self, world_size: usize) -> Self {
        self.world_size = Some(world_size);
        self
    }

    /// This rank's number on its host, counted from 0.
    pub fn local_rank(mut self, local_rank: usize) -> Self {
        self.local_rank = Some(local_rank);
        self
    }

    /// Which attempt at this rendezvous it is: keys of different attempts in one store never meet. A session that takes
    /// the place of a failed one needs the next number, the same on all ranks.
    pub fn attempt(mut self, attempt: u64) -> Self {
        self.attempt = attempt;
        self
    }

    /// The network interface to use, by name. Unless told: loopback if the ranks meet there, else the one that the
    /// machine's name resolves to.
    pub fn interface(mut self, name: impl Into<String>) -> Self {
        self.interface = Some(name.into());
        self
    }

    /// Deadline for [`build`](Self::build). 5 minutes unless told.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Deadline for each operation. 10 minutes unless told: it has to cover how far apart ranks arrive.
    pub fn operation_timeout(mut self, timeout: Duration) -> Self {
        self.options.operation_timeout = timeout;
        self
    }

    /// Deadline for [`commit_checkpoint`](SyncSession::commit_checkpoint) in place of that for an operation. 30 minutes
    /// unless told: rank 0 writes the file in that time and reads it back, while the others wait.
    pub fn commit_timeout(mut self, timeout: Duration) -> Self {
        self.options.commit_timeout = timeout;
        self
    }

    /// How long after a failure a rank waits to hear where the others stood. 500 ms unless told.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.options.grace = grace;
        self
    }

    /// The most bytes in a bucket; a larger tensor is alone in one. 32 MiB unless told.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.options.bucket_bytes = bytes;
        self
    }

    /// Tensors of this many bytes or more are reduced where they lie, smaller ones packed. 1 MiB unless told. Without
    /// meaning for [`Transport::Flat`].
    pub fn in_place_bytes(mut self, bytes: usize) -> Self {
        self.options.in_place_bytes = bytes;
        self
    }

    /// How buckets travel.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.options.transport = transport;
        self
    }

    /// When ranks meet around the movement of data.
    pub fn fence_policy(mut self, policy: FencePolicy) -> Self {
        self.options.fence_policy = policy;
        self
    }

    /// Sums gradients of `bfloat16` and `float16` in this type, and casts the sum back. Only [`Kind::Float`] is
    /// supported.
    pub fn reduction_dtype(mut self, kind: Kind) -> Self {
        self.reduction_dtype = Some(kind);
        self
    }

    /// What [`assert_rank_equal`](SyncSession::assert_rank_equal) compares tensors by, unless a call says
    /// otherwise. SHA-256 unless told. The same on all ranks.
    pub fn digest(mut self, algorithm: DigestAlgorithm) -> Self {
        self.options.digest = algorithm;
        self
    }

    /// Threads for hashing. One for each core unless told, or this rank's share of them under a launcher that sets
    /// `LOCAL_WORLD_SIZE`.
    pub fn threads(mut self, threads: usize) -> Self {
        self.options.threads = threads;
        self
    }

    /// Test-only: what happens at the points of an operation.
    #[cfg(feature = "fault-injection")]
    pub fn fault_hook(mut self, hook: crate::fault::Hook) -> Self {
        self.faults = Faults::with_hook(hook);
        self
    }

    /// Connects. Collective: every rank calls it.
    ///
    /// # Errors
    ///
    /// [`SyncError::Configuration`] for settings that are missing or make no sense; [`SyncError::Connect`] if the ranks
    /// do not come together within the connect deadline; [`SyncError::Desynchronized`] if they were built with different
    /// options.
    pub fn build(mut self) -> Result<SyncSession> {
        let required = |name: &str, value: Option<usize>| {
            value.ok_or_else(|| SyncError::configuration(name, "is not set, neither on the builder nor by a launcher"))
        };
        let rank = required("rank", self.rank)?;
        let world_size = required("world_size", self.world_size)?;
        let rendezvous = self.rendezvous.ok_or_else(|| {
            SyncError::configuration("rendezvous", "is not set, neither on the builder nor by a launcher")
        })?;
        if world_size == 0 || i32::try_from(world_size).is_err() {
            return Err(SyncError::configuration("world_size", format!("{world_size} is not a number of ranks")));
        }
        if rank >= world_size {
            return Err(SyncError::configuration(
                "rank",
                format!("{rank} is out of range: with {world_size} ranks they are 0 to {}", world_size - 1),
            ));
        }
        if self.options.bucket_bytes == 0 {
            return Err(SyncError::configuration("bucket_bytes", "must be at least 1"));
        }
        for (name, timeout) in [
            ("connect_timeout", self.connect_timeout),
            ("operation_timeout", self.options.operation_timeout),
            ("commit_timeout", self.options.commit_timeout),
        ] {
            if timeout.is_zero() {
                return Err(SyncError::configuration(name, "must be longer than zero"));
            }
        }
        match self.reduction_dtype {
            None => {}
            Some(Kind::Float) => self.options.reduce_in_float32 = true,
            Some(other) => {
                return Err(SyncError::configuration(
                    "reduction_dtype",
                    format!("{other:?} is not supported, only Float is"),
                ));
            }
        }
        let connect = ConnectOptions {
            rendezvous,
            rank,
            world_size,
            attempt: self.attempt,
            interface: self.interface,
            limit: self.connect_timeout,
            faults: self.faults,
        };
        SyncSession::connect(&connect, self.options, self.local_rank)
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|_| SyncError::configuration(name, format!("{text:?} is not a number in range")))
}

#[cfg(test)]
mod tests {
    use super::SessionBuilder;
    use crate::collective::Rendezvous;

    fn environment(changes: &[(&str, Option<&str>)]) -> crate::Result<SessionBuilder> {
        let usual = [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        SessionBuilder::new().with_environment(|name| match changes.iter().find(|(variable, _)| *variable == name) {
            Some((_, value)) => value.map(String::from),
            None => usual.iter().find(|(usual, _)| *usual == name).map(|(_, value)| (*value).to_string()),
        })
    }

    #[track_caller]
    fn assert_refused(changes: &[(&str, Option<&str>)], names: &str) {
        let error = environment(changes).unwrap_err().to_string();
        assert!(error.contains(names), "{error}");
    }

    #[test]
    fn torchrun_variables_are_taken() {
        let builder = environment(&[
            ("LOCAL_RANK", Some("1")),
            ("TORCHELASTIC_RESTART_COUNT", Some("3")),
            ("TORCHELASTIC_USE_AGENT_STORE", Some("True")),
            ("GLOO_SOCKET_IFNAME", Some("eth1,eth2")),
        ])
        .unwrap();
        assert_eq!((builder.rank, builder.world_size, builder.local_rank), (Some(1), Some(4), Some(1)));
        assert_eq!((builder.attempt, builder.interface.as_deref()), (3, Some("eth1")));
        assert!(matches!(
            builder.rendezvous,
            Some(Rendezvous::Tcp { host, port: 29500, hosted_elsewhere: true }) if host == "10.0.0.1"
        ));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            assert_refused(&[(name, None)], name);
        }
        assert_refused(&[("RANK", Some("one"))], "RANK: \"one\"");
        assert_refused(&[("RANK", Some("-1"))], "RANK: \"-1\"");
        assert_refused(&[("MASTER_PORT", Some("70000"))], "MASTER_PORT: \"70000\"");
    }
}
