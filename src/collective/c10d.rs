//! The C++ fence: libtorch's own `c10d` and the parts of its tensors that `tch` does not reach, bound with `cxx`.
//!
//! This module holds all the `unsafe` code of the crate. What it exports is safe: tensors come in as [`tch::Tensor`],
//! works are named by a [`Ticket`] and owned by their [`Group`]'s ledger, and every failure is an [`EngineError`].

use std::time::Duration;

use cxx::{SharedPtr, UniquePtr};
use tch::Tensor;

use crate::error::{EngineError, EngineErrorKind};

// What cxx generates is public within a private module; counting allocations is for tests and benches.
#[allow(unreachable_pub, dead_code)]
#[cxx::bridge(namespace = "sft_sync")]
mod ffi {
    /// What the crate needs to know of a tensor, read in one call.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    struct TensorFacts {
        defined: bool,
        quantized: bool,
        requires_grad: bool,
        is_leaf: bool,
        /// Default-contiguous in logical order, without lazy conjugate or negative bits.
        contiguous: bool,
        /// Elements do not share memory and leave no gaps.
        dense: bool,
        /// Elements are known to share memory (an expanded tensor).
        overlapping: bool,
        /// 0 strided, 1 sparse, 2 another layout.
        layout: u8,
        /// `c10::ScalarType`.
        scalar_type: i8,
        /// `c10::DeviceType` and index (-1: none).
        device_type: i8,
        device_index: i8,
        element_size: u64,
        numel: i64,
        /// Two handles to one autograd tensor have the same identity.
        identity: usize,
        /// Address range of the elements; both 0 when there are none.
        begin: usize,
        end: usize,
    }

    unsafe extern "C++" {
        include!("sft-sync/src/collective/c10d/shim.h");

        fn start_counting_allocations();
        fn allocation_count() -> u64;
        fn allocation_peak() -> u64;

        type Tensor;
        type TensorList;
        type Store;
        type Group;

        fn header_abi_version() -> u64;
        fn library_abi_version() -> u64;

        fn inspect(tensor: &Tensor) -> Result<TensorFacts>;
        fn inspect_grad(parameter: &Tensor) -> Result<TensorFacts>;
        fn sizes(tensor: &Tensor) -> &[i64];
        fn grad_sizes(parameter: &Tensor) -> Result<Vec<i64>>;
        fn clear_grad(parameter: &Tensor) -> Result<()>;
        fn bump_version(tensor: &Tensor) -> Result<()>;
        fn bytes(tensor: &Tensor) -> Result<&[u8]>;
        fn write_bytes(tensor: &Tensor, source: &[u8]) -> Result<()>;
        fn prefetch(bytes: &[u8]);
        fn take_grad(parameter: &Tensor) -> Result<UniquePtr<Tensor>>;
        fn as_bytes(tensor: &Tensor) -> Result<UniquePtr<Tensor>>;
        fn materialize(tensor: &Tensor) -> Result<UniquePtr<Tensor>>;

        fn new_tensor_list() -> UniquePtr<TensorList>;
        fn push(self: Pin<&mut TensorList>, tensor: &Tensor) -> Result<()>;
        fn pack(self: &TensorList, flat: &Tensor) -> Result<()>;
        fn unpack(self: &TensorList, flat: &Tensor) -> Result<()>;

        fn tcp_store(host: &str, port: u16, is_server: bool, timeout_ms: u64) -> Result<SharedPtr<Store>>;
        fn tcp_store_port(store: &Store) -> Result<u16>;
        fn file_store(path: &str) -> Result<SharedPtr<Store>>;
        fn hash_store() -> Result<SharedPtr<Store>>;
        fn prefix_store(prefix: &str, store: &Store) -> Result<SharedPtr<Store>>;
        fn set(self: &Store, key: &str, value: &[u8]) -> Result<()>;
        fn get(self: &Store, key: &str) -> Result<Vec<u8>>;
        fn add(self: &Store, key: &str, amount: i64) -> Result<i64>;
        fn compare_set(self: &Store, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;
        fn has(self: &Store, key: &str) -> Result<bool>;
        fn wait(self: &Store, key: &str, timeout_ms: u64) -> Result<()>;
        fn set_timeout(self: &Store, timeout_ms: u64) -> Result<()>;

        fn gloo_group(
            store: &Store,
            rank: u32,
            size: u32,
            timeout_ms: u64,
            interface: &str,
            hostname: &str,
        ) -> Result<UniquePtr<Group>>;
        fn all_reduce_sum(self: Pin<&mut Group>, tensor: &Tensor, timeout_ms: u64) -> Result<u64>;
        fn all_reduce_max(self: Pin<&mut Group>, tensor: &Tensor, timeout_ms: u64) -> Result<u64>;
        fn broadcast(self: Pin<&mut Group>, tensor: &Tensor, root: u32, timeout_ms: u64) -> Result<u64>;
        fn all_gather(self: Pin<&mut Group>, output: &Tensor, input: &Tensor, timeout_ms: u64) -> Result<u64>;
        fn send(self: Pin<&mut Group>, tensor: &Tensor, destination: u32, tag: u32) -> Result<u64>;
        fn receive(self: Pin<&mut Group>, tensor: &Tensor, source: u32, tag: u32) -> Result<u64>;
        fn barrier(self: Pin<&mut Group>, timeout_ms: u64) -> Result<u64>;
        #[cxx_name = "wait"]
        fn wait_for(self: Pin<&mut Group>, ticket: u64, timeout_ms: u64) -> Result<()>;
        fn abort(self: Pin<&mut Group>);
        fn drain(self: Pin<&mut Group>, timeout_ms: u64) -> usize;
        fn outstanding(self: &Group) -> usize;
    }
}

pub(crate) use ffi::TensorFacts;

// SAFETY: c10d's stores guard their state and their connection with a mutex of their own (the "active operation" lock
// of TCPStore and FileStore, the map lock of HashStore), and the wrapper is an immutable counted pointer.
unsafe impl Send for ffi::Store {}
// SAFETY: as above; every method takes the inner lock.
unsafe impl Sync for ffi::Store {}
// SAFETY: a c10d backend has no affinity to the thread that made it; `Group` is moved between threads only whole, and
// all its methods that touch the ledger or the backend take `Pin<&mut Self>`.
unsafe impl Send for ffi::Group {}

type Result<T> = std::result::Result<T, EngineError>;

impl From<cxx::Exception> for EngineError {
    fn from(exception: cxx::Exception) -> Self {
        // The shim puts the kind, which it knows from the exception's type, in front of the message.
        let text = exception.what();
        let (kind, message) = match text.as_bytes().first() {
            Some(b'T') => (EngineErrorKind::Timeout, &text[1..]),
            Some(b'C') => (EngineErrorKind::ConnectionLost, &text[1..]),
            Some(b'O') => (EngineErrorKind::Other, &text[1..]),
            _ => (EngineErrorKind::Other, text),
        };
        EngineError::new(kind, message)
    }
}

/// The ABI version (major, minor and patch of PyTorch) of the headers that this crate was compiled with, and of the
/// library that is loaded. Virtual tables differ between versions, so both must be the same.
pub(crate) fn abi_versions() -> (u64, u64) {
    (ffi::header_abi_version(), ffi::library_abi_version())
}

/// From now on torch's CPU allocations of this process are counted, from zero.
#[cfg(feature = "raw-engine")]
pub(crate) fn start_counting_allocations() {
    ffi::start_counting_allocations();
}

/// Number of allocations since counting began, and the most bytes held at one time.
#[cfg(feature = "raw-engine")]
pub(crate) fn allocations() -> (u64, u64) {
    (ffi::allocation_count(), ffi::allocation_peak())
}

fn torch(tensor: &Tensor) -> &ffi::Tensor {
    // SAFETY: `as_ptr` gives the address of the `at::Tensor` that `tensor` owns, valid and not moved for as long as
    // `tensor` is borrowed; `ffi::Tensor` is that type.
    unsafe { &*tensor.as_ptr().cast::<ffi::Tensor>() }
}

fn owned(tensor: UniquePtr<ffi::Tensor>) -> Tensor {
    // SAFETY: the pointer comes from `new at::Tensor` and is given up here; `tch` frees it with `delete`.
    unsafe { Tensor::from_ptr(tensor.into_raw().cast()) }
}

/// Milliseconds of a wait, rounded up, never 0: to c10d 0 means "for ever".
fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}

pub(crate) fn inspect(tensor: &Tensor) -> Result<TensorFacts> {
    Ok(ffi::inspect(torch(tensor))?)
}

/// The facts of the parameter's gradient (`defined` is false where there is none).
pub(crate) fn inspect_grad(parameter: &Tensor) -> Result<TensorFacts> {
    Ok(ffi::inspect_grad(torch(parameter))?)
}

/// The shape, without the allocation of [`Tensor::size`].
pub(crate) fn sizes(tensor: &Tensor) -> &[i64] {
    ffi::sizes(torch(tensor))
}

/// The shape of the parameter's gradient.
pub(crate) fn grad_sizes(parameter: &Tensor) -> Result<Vec<i64>> {
    Ok(ffi::grad_sizes(torch(parameter))?)
}

/// Makes the gradient undefined.
pub(crate) fn clear_grad(parameter: &Tensor) -> Result<()> {
    Ok(ffi::clear_grad(torch(parameter))?)
}

/// Tells autograd that the tensor was written to.
pub(crate) fn bump_version(tensor: &Tensor) -> Result<()> {
    Ok(ffi::bump_version(torch(tensor))?)
}

/// The bytes of a plain contiguous CPU tensor, without a copy.
///
/// They are the tensor's own memory: the caller keeps the tensor from being written to meanwhile.
pub(crate) fn bytes(tensor: &Tensor) -> Result<&[u8]> {
    Ok(ffi::bytes(torch(tensor))?)
}

/// Overwrites a CPU tensor of uint8 with as many bytes.
pub(crate) fn write_bytes(tensor: &mut Tensor, source: &[u8]) -> Result<()> {
    Ok(ffi::write_bytes(torch(tensor), source)?)
}

/// Asks for the cache lines of `bytes` and does not wait for them. A hint: nothing is read.
pub(crate) fn prefetch(bytes: &[u8]) {
    ffi::prefetch(bytes);
}

/// The parameter's gradient, detached and fit to be written in place: an absent one is set to zeros first, one whose
/// elements share memory is replaced by a contiguous copy first.
pub(crate) fn take_grad(parameter: &Tensor) -> Result<Tensor> {
    Ok(owned(ffi::take_grad(torch(parameter))?))
}

/// A plain contiguous tensor as a flat tensor of uint8 that shares its storage, outside autograd.
pub(crate) fn as_bytes(tensor: &Tensor) -> Result<Tensor> {
    Ok(owned(ffi::as_bytes(torch(tensor))?))
}

/// A plain contiguous CPU tensor with the same logical content, sharing storage where that is possible.
pub(crate) fn materialize(tensor: &Tensor) -> Result<Tensor> {
    Ok(owned(ffi::materialize(torch(tensor))?))
}

/// Tensors that travel in one flat buffer.
pub(crate) struct TensorList(UniquePtr<ffi::TensorList>);

impl TensorList {
    pub(crate) fn new() -> Self {
        Self(ffi::new_tensor_list())
    }

    pub(crate) fn push(&mut self, tensor: &Tensor) -> Result<()> {
        Ok(self.0.pin_mut().push(torch(tensor))?)
    }

    /// Copies the members to the front of `flat`, one after another in logical order, cast to its dtype.
    pub(crate) fn pack(&self, flat: &Tensor) -> Result<()> {
        Ok(self.0.pack(torch(flat))?)
    }

    /// The way back.
    pub(crate) fn unpack(&self, flat: &Tensor) -> Result<()> {
        Ok(self.0.unpack(torch(flat))?)
    }
}

/// A key-value store that all ranks reach. Its calls may block longer than their timeout where the store's host is
/// stopped: [`super::store`] calls them where that cannot hold a caller.
#[derive(Clone)]
pub(crate) struct Store(SharedPtr<ffi::Store>);

impl Store {
    pub(crate) fn tcp(host: &str, port: u16, is_server: bool, timeout: Duration) -> Result<Self> {
        Ok(Self(ffi::tcp_store(host, port, is_server, millis(timeout))?))
    }

    /// The port that a TCP store's server listens on.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(crate) fn tcp_port(&self) -> Result<u16> {
        Ok(ffi::tcp_store_port(&self.0)?)
    }

    pub(crate) fn file(path: &str) -> Result<Self> {
        Ok(Self(ffi::file_store(path)?))
    }

    /// For ranks that are threads of one process.
    pub(crate) fn hash() -> Result<Self> {
        Ok(Self(ffi::hash_store()?))
    }

    pub(crate) fn prefixed(&self, prefix: &str) -> Result<Self> {
        Ok(Self(ffi::prefix_store(prefix, &self.0)?))
    }

    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        Ok(self.0.set(key, value)?)
    }

    /// Blocks until the key exists, or the store's own timeout.
    pub(crate) fn get(&self, key: &str) -> Result<Vec<u8>> {
        Ok(self.0.get(key)?)
    }

    /// Adds to a counter, atomically; returns the new value.
    pub(crate) fn add(&self, key: &str, amount: i64) -> Result<i64> {
        Ok(self.0.add(key, amount)?)
    }

    /// Sets the key if it is absent, atomically; returns what it holds afterwards.
    pub(crate) fn set_once(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        Ok(self.0.compare_set(key, &[], value)?)
    }

    pub(crate) fn has(&self, key: &str) -> Result<bool> {
        Ok(self.0.has(key)?)
    }

    pub(crate) fn wait(&self, key: &str, timeout: Duration) -> Result<()> {
        Ok(self.0.wait(key, millis(timeout))?)
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) -> Result<()> {
        Ok(self.0.set_timeout(millis(timeout))?)
    }
}

/// Names a posted work in its group's ledger.
#[derive(Debug)]
#[must_use = "a posted work must be waited for"]
pub(crate) struct Ticket(u64);

/// A set of ranks that are connected with each other. All its works are waited for, on every path: by
/// [`Group::wait`], by [`Group::drain`] after [`Group::abort`], or when it is dropped.
pub(crate) struct Group(UniquePtr<ffi::Group>);

/// Which network device a group uses; neither set: the engine's choice (the one that the machine's name resolves to).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NetworkDevice<'a> {
    pub(crate) interface: Option<&'a str>,
    pub(crate) hostname: Option<&'a str>,
}

impl Group {
    /// Connects a full mesh over Gloo. Collective; blocks until all ranks have come or the timeout has passed.
    pub(crate) fn gloo(
        store: &Store,
        rank: u32,
        size: u32,
        timeout: Duration,
        device: NetworkDevice<'_>,
    ) -> Result<Self> {
        Ok(Self(ffi::gloo_group(
            &store.0,
            rank,
            size,
            millis(timeout),
            device.interface.unwrap_or_default(),
            device.hostname.unwrap_or_default(),
        )?))
    }

    pub(crate) fn all_reduce_sum(&mut self, tensor: &Tensor, timeout: Duration) -> Result<Ticket> {
        Ok(Ticket(self.0.pin_mut().all_reduce_sum(torch(tensor), millis(timeout))?))
    }

    #[cfg_attr(not(test), allow(dead_code))] // Beside what the session uses, for tests and benches.
    pub(crate) fn all_reduce_max(&mut self, tensor: &Tensor, timeout: Duration) -> Result<Ticket> {
        Ok(Ticket(self.0.pin_mut().all_reduce_max(torch(tensor), millis(timeout))?))
    }

    pub(crate) fn broadcast(&mut self, tensor: &Tensor, root: u32, timeout: Duration) -> Result<Ticket> {
        Ok(Ticket(self.0.pin_mut().broadcast(torch(tensor), root, millis(timeout))?))
    }

    /// `output` receives every rank's `input`, in the order of ranks.
    pub(crate) fn all_gather(&mut self, output: &Tensor, input: &Tensor, timeout: Duration) -> Result<Ticket> {
        Ok(Ticket(self.0.pin_mut().all_gather(torch(output), torch(input), millis(timeout))?))
    }

    pub(crate) fn send(&mut self, tensor: &Tensor, destination: u32, tag: u32) -> Result<Ticket> {
        Ok(Ticket(self.0.pin_mut().send(torch(tensor), destination, tag)?))
    }

    pub(crate) fn receive(&mut self, tensor: &Tensor, source: u32, tag: u32) -> Result<Ticket> {
        Ok(Ticket(self.0.pin_mut().receive(torch(tensor), source, tag)?))
    }

    #[cfg_attr(not(test), allow(dead_code))] // Beside what the session uses, for tests and benches.
    pub(crate) fn barrier(&mut self, timeout: Duration) -> Result<Ticket> {
        Ok(Ticket(self.0.pin_mut().barrier(millis(timeout))?))
    }

    /// Waits for one work. After a timeout the work still runs, and stays in the ledger.
    // By value: a ticket is waited for once, and the ledger may not know it afterwards.
    #[allow(clippy::needless_pass_by_value)]
    pub(crate) fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<()> {
        Ok(self.0.pin_mut().wait_for(ticket.0, millis(timeout))?)
    }

    /// Closes all connections of the group: what is in flight ends, and peers are told at once.
    pub(crate) fn abort(&mut self) {
        self.0.pin_mut().abort();
    }

    /// Waits for everything in flight, within `timeout` in all; returns how many works are still running.
    pub(crate) fn drain(&mut self, timeout: Duration) -> usize {
        self.0.pin_mut().drain(millis(timeout))
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.0.outstanding()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use tch::{Device, Kind, Tensor};

    use super::{Group, NetworkDevice, Store, abi_versions};
    use crate::error::EngineErrorKind;

    const MINUTE: Duration = Duration::from_secs(60);
    const LOOPBACK: NetworkDevice<'static> = NetworkDevice { interface: None, hostname: Some("127.0.0.1") };

    /// Runs `body` as every rank of a connected group.
    #[track_caller]
    fn groups(size: u32, body: impl Fn(u32, Group) + Sync) {
        let store = Store::hash().unwrap();
        thread::scope(|scope| {
            for rank in 0..size {
                let (store, body) = (&store, &body);
                scope.spawn(move || body(rank, Group::gloo(store, rank, size, MINUTE, LOOPBACK).unwrap()));
            }
        });
    }

    fn ramp(rank: u32, numel: i64) -> Tensor {
        (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * 3 + f64::from(rank * 5)).remainder(13.0)
    }

    #[test]
    fn header_and_library_are_of_one_version() {
        let (compiled, loaded) = abi_versions();
        assert_eq!(compiled, loaded);
        assert_eq!(compiled >> 56, 2);
    }

    #[test]
    fn collectives_at_sizes_and_lengths() {
        for size in [1, 2, 3, 4, 7] {
            groups(size, |rank, mut group| {
                for numel in [1, 2, 61, 1024, 100_003] {
                    let sum = ramp(rank, numel);
                    let ticket = group.all_reduce_sum(&sum, MINUTE).unwrap();
                    group.wait(ticket, MINUTE).unwrap();
                    let expected = (0..size)
                        .fold(Tensor::zeros([numel], (Kind::Float, Device::Cpu)), |all, rank| all + ramp(rank, numel));
                    assert!(sum.equal(&expected), "sum of {numel} at {size}");

                    let most = ramp(rank, numel);
                    let ticket = group.all_reduce_max(&most, MINUTE).unwrap();
                    group.wait(ticket, MINUTE).unwrap();
                    let expected = (0..size).fold(ramp(0, numel), |all, rank| all.maximum(&ramp(rank, numel)));
                    assert!(most.equal(&expected), "maximum of {numel} at {size}");

                    let root = size - 1;
                    let sent = ramp(rank, numel);
                    let ticket = group.broadcast(&sent, root, MINUTE).unwrap();
                    group.wait(ticket, MINUTE).unwrap();
                    assert!(sent.equal(&ramp(root, numel)), "broadcast of {numel} at {size}");

                    let all = Tensor::zeros([numel * i64::from(size)], (Kind::Float, Device::Cpu));
                    let ticket = group.all_gather(&all, &ramp(rank, numel), MINUTE).unwrap();
                    group.wait(ticket, MINUTE).unwrap();
                    let expected = Tensor::cat(&(0..size).map(|rank| ramp(rank, numel)).collect::<Vec<_>>(), 0);
                    assert!(all.equal(&expected), "gather of {numel} at {size}");
                }
                let ticket = group.barrier(MINUTE).unwrap();
                group.wait(ticket, MINUTE).unwrap();
                assert_eq!(group.outstanding(), 0);
            });
        }
    }

    #[test]
    fn a_wait_that_times_out_leaves_the_work_in_the_ledger_and_abort_ends_it() {
        groups(3, |rank, mut group| {
            if rank == 2 {
                // Comes to nothing, but stays until the others are done: they wait for its connections to close.
                let tensor = ramp(rank, 1 << 20);
                assert!(group.receive(&tensor, 0, 77).and_then(|ticket| group.wait(ticket, MINUTE)).is_err());
                return;
            }
            let tensor = ramp(rank, 1 << 20);
            let ticket = group.all_reduce_sum(&tensor, MINUTE).unwrap();
            let error = group.wait(ticket, Duration::from_millis(50)).unwrap_err();
            if error.kind() == EngineErrorKind::Timeout {
                assert_eq!(group.outstanding(), 1, "a running work must stay known");
            }
            let start = Instant::now();
            group.abort();
            assert_eq!(group.drain(Duration::from_secs(5)), 0);
            assert!(start.elapsed() < Duration::from_secs(2), "abort took {:?}", start.elapsed());
            // Nothing can be done with the group afterwards, and it says so at once.
            let start = Instant::now();
            let error = group.send(&ramp(rank, 1), 2, 5).and_then(|ticket| group.wait(ticket, MINUTE)).unwrap_err();
            assert_eq!(error.kind(), EngineErrorKind::ConnectionLost, "{error}");
            assert!(start.elapsed() < Duration::from_secs(2));
        });
    }

    #[test]
    fn a_peer_that_is_gone_is_a_lost_connection() {
        groups(2, |rank, mut group| {
            if rank == 0 {
                let tensor = ramp(0, 4);
                let error = group.receive(&tensor, 1, 1).and_then(|ticket| group.wait(ticket, MINUTE)).unwrap_err();
                assert_eq!(error.kind(), EngineErrorKind::ConnectionLost, "{error}");
            }
        });
    }

    #[test]
    fn dropping_a_group_with_work_in_flight_takes_no_time() {
        groups(2, |rank, mut group| {
            if rank == 0 {
                let tensor = ramp(0, 1 << 20);
                let _ = group.all_reduce_sum(&tensor, MINUTE).unwrap();
                let _ = group.receive(&tensor, 1, 3).unwrap();
                let start = Instant::now();
                drop(group);
                assert!(start.elapsed() < Duration::from_secs(2), "took {:?}", start.elapsed());
            } else {
                let tensor = ramp(1, 1);
                assert!(group.receive(&tensor, 0, 4).and_then(|ticket| group.wait(ticket, MINUTE)).is_err());
            }
        });
    }

    #[test]
    fn stores_of_every_kind_keep_the_same_contract() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("store");
        let tcp = Store::tcp("127.0.0.1", 0, true, MINUTE).unwrap();
        let port = tcp.tcp_port().unwrap();
        let client = Store::tcp("127.0.0.1", port, false, MINUTE).unwrap();
        let hash = Store::hash().unwrap();
        for store in [Store::file(file.to_str().unwrap()).unwrap(), client, hash.prefixed("a/b").unwrap(), hash] {
            store.set("key", b"value").unwrap();
            assert!(store.has("key").unwrap() && !store.has("other").unwrap());
            assert_eq!(store.get("key").unwrap(), b"value");
            assert_eq!((store.add("count", 2).unwrap(), store.add("count", 3).unwrap()), (2, 5));
            assert_eq!(store.set_once("once", b"first").unwrap(), b"first");
            assert_eq!(store.set_once("once", b"second").unwrap(), b"first");
            store.wait("key", MINUTE).unwrap();
            let start = Instant::now();
            let error = store.wait("never", Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.kind(), EngineErrorKind::Timeout, "{error}");
            assert!(start.elapsed() < Duration::from_secs(5));
        }
    }
}
