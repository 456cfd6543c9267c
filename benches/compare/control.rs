//! The control plane at many ranks, as threads of this process: agreements, and connecting.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use sft_sync::{InProcess, Rendezvous, SyncSession};
use tch::{Device, Kind, Tensor};

/// Connects `world` ranks and runs `body` on each; also the seconds until the last had connected.
fn ranks(world: usize, body: impl Fn(&mut SyncSession) + Sync) -> f64 {
    let place = InProcess::new().expect("a store");
    let slowest = Mutex::new(0.0_f64);
    thread::scope(|scope| {
        for rank in 0..world {
            let builder = SyncSession::builder()
                .rendezvous(Rendezvous::InProcess(place.clone()))
                .rank(rank)
                .world_size(world)
                .threads(1)
                .connect_timeout(Duration::from_secs(120));
            let (body, slowest) = (&body, &slowest);
            scope.spawn(move || {
                let start = Instant::now();
                let mut session = builder.build().expect("the ranks should connect");
                let seconds = start.elapsed().as_secs_f64();
                let mut most = slowest.lock().expect("no rank panics");
                *most = most.max(seconds);
                drop(most);
                body(&mut session);
                session.shutdown().expect("all ranks are there");
            });
        }
    });
    slowest.into_inner().expect("no rank panics")
}

/// Seconds of each block of rounds, as rank 0 sees them, in turn: agreement, c10d's barrier, c10d's `all_reduce` of 256
/// bytes.
pub(crate) struct Control {
    pub(crate) agreement: Vec<f64>,
    pub(crate) barrier: Vec<f64>,
    pub(crate) all_reduce: Vec<f64>,
    pub(crate) connect: f64,
}

const BLOCKS: u32 = 10;

/// `rounds` agreements and barriers, and `reduces` `all_reduce`s, which take far longer at many ranks.
pub(crate) fn measure(world: usize, rounds: u32, reduces: u32) -> Control {
    let result = Mutex::new((Vec::new(), Vec::new(), Vec::new()));
    let connect = ranks(world, |session| {
        let small = Tensor::zeros([256], (Kind::Uint8, Device::Cpu));
        for _ in 0..BLOCKS {
            let agreement = block(rounds / BLOCKS, session, SyncSession::raw_agreement);
            let barrier = block(rounds / BLOCKS, session, SyncSession::raw_barrier);
            let all_reduce = block((reduces / BLOCKS).max(1), session, |session| session.raw_all_reduce(&small));
            if session.rank() == 0 {
                let mut result = result.lock().expect("no rank panics");
                result.0.push(agreement);
                result.1.push(barrier);
                result.2.push(all_reduce);
            }
        }
    });
    let (agreement, barrier, all_reduce) = result.into_inner().expect("no rank panics");
    Control { agreement, barrier, all_reduce, connect }
}

/// Comparing the digests of 1000 tensors on `world` ranks, hashing excluded: seconds of an agreement on their root, and
/// of an all-gather of all of them (100 bytes each: name and hexadecimal digest).
pub(crate) fn compare_digests(world: usize, rounds: u32) -> (Vec<f64>, Vec<f64>) {
    let result = Mutex::new((Vec::new(), Vec::new()));
    ranks(world, |session| {
        let own = Tensor::zeros([100_000], (Kind::Uint8, Device::Cpu));
        let all = Tensor::zeros([100_000 * i64::try_from(world).unwrap_or(0)], (Kind::Uint8, Device::Cpu));
        for _ in 0..rounds {
            let agreement = block(10, session, SyncSession::raw_agreement);
            let gather = block(1, session, |session| session.raw_all_gather(&all, &own));
            if session.rank() == 0 {
                let mut result = result.lock().expect("no rank panics");
                result.0.push(agreement);
                result.1.push(gather);
            }
        }
    });
    result.into_inner().expect("no rank panics")
}

/// Seconds of one round, on average over a block.
fn block<E: std::fmt::Debug>(
    rounds: u32,
    session: &mut SyncSession,
    round: impl Fn(&mut SyncSession) -> Result<(), E>,
) -> f64 {
    let start = Instant::now();
    for _ in 0..rounds {
        round(session).expect("all ranks are there");
    }
    start.elapsed().as_secs_f64() / f64::from(rounds)
}

/// Seconds to connect, and open sockets of this process meanwhile; none if the process may not open so many. Both ends of
/// each connection of two groups are in this process.
pub(crate) fn connect(world: usize) -> Option<(f64, usize)> {
    let needed = 2 * world * (world - 1) + 20 * world;
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if usize::try_from(limit).is_ok_and(|limit| limit < needed) {
        return None;
    }
    let sockets = Mutex::new(0);
    let seconds = ranks(world, |session| {
        if session.rank() == 0 {
            *sockets.lock().expect("no rank panics") = open_sockets();
        }
        session.raw_barrier().expect("all ranks are there");
    });
    Some((seconds, sockets.into_inner().expect("no rank panics")))
}

fn open_sockets() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| {
        entries
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .filter(|target| target.to_string_lossy().starts_with("socket:"))
            .count()
    })
}
