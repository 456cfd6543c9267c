//! One rank as a process: does on command what is measured, and prints the seconds.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Instant;

use sft_sync::{DigestAlgorithm, FencePolicy, Parameters, Rendezvous, SyncSession, count_allocations};
use sha2::{Digest as _, Sha256};
use tch::{Device, Kind, Tensor};

use crate::workload::Workload;

struct Worker {
    every_bucket: SyncSession,
    step: SyncSession,
    calls: u64,
    held: HashMap<&'static str, Held>,
}

struct Held {
    tensors: Vec<Tensor>,
    parameters: Parameters,
    flat: Tensor,
}

pub(crate) fn run(rank: usize, store: &Path) {
    tch::set_num_threads(1);
    let connect = |suffix: &str, policy| {
        SyncSession::builder()
            .rendezvous(Rendezvous::File(store.with_extension(suffix)))
            .rank(rank)
            .world_size(2)
            .threads(1)
            .fence_policy(policy)
            .build()
            .expect("the ranks should connect")
    };
    let mut worker = Worker {
        every_bucket: connect("bucket", FencePolicy::EveryBucket),
        step: connect("step", FencePolicy::Step),
        calls: 0,
        held: HashMap::new(),
    };
    println!("ready");
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let (command, workload) = line.split_once(' ').expect("a command and a workload");
        let workload = <Workload as clap::ValueEnum>::from_str(workload, true).expect("a workload");
        println!("{}", worker.measure(command, workload));
        std::io::stdout().flush().expect("the harness reads");
    }
}

impl Worker {
    fn measure(&mut self, command: &str, workload: Workload) -> f64 {
        let held = self.held.entry(workload.name()).or_insert_with(|| {
            let tensors = workload.tensors();
            let flat = Tensor::ones([workload.nbytes() / 4], (Kind::Float, Device::Cpu));
            Held { parameters: Workload::parameters(&tensors), tensors, flat }
        });
        let _ = held.flat.fill_(1.0);
        for tensor in &held.tensors {
            let _ = tensor.grad().fill_(1.0);
        }
        self.calls += 1;
        let calls = self.calls;
        if command == "memory" {
            return extra_over_gradients(&mut self.every_bucket, held, workload, calls);
        }
        self.every_bucket.raw_barrier().expect("the other rank is there");
        let start = Instant::now();
        match command {
            "ours" => drop(self.every_bucket.synchronize_gradients(calls, &held.parameters).expect("sync")),
            "step" => drop(self.step.synchronize_gradients(calls, &held.parameters).expect("sync")),
            "broadcast" => drop(self.every_bucket.broadcast_trainable_parameters(&held.parameters).expect("broadcast")),
            "check_sha256" => check(&mut self.every_bucket, DigestAlgorithm::Sha256, held),
            "check_blake3" => check(&mut self.every_bucket, DigestAlgorithm::Blake3, held),
            "check_fingerprint" => check(&mut self.every_bucket, DigestAlgorithm::Fingerprint, held),
            "sha256_in_cache" => sha256_in_cache(workload),
            "memcpy" => drop(held.flat.copy()),
            "raw" => self.every_bucket.raw_all_reduce(&held.flat).expect("all_reduce"),
            "raw_broadcast" => self.every_bucket.raw_broadcast(&held.flat).expect("broadcast"),
            other => panic!("no measurement is called {other}"),
        }
        start.elapsed().as_secs_f64()
    }
}

fn check(session: &mut SyncSession, algorithm: DigestAlgorithm, held: &Held) {
    let _ = session.assert_rank_equal_with(algorithm, held.parameters.values(), "bench").expect("the ranks are equal");
}

/// As many bytes as the workload has, out of 64 KiB that stay in the cache.
fn sha256_in_cache(workload: Workload) {
    let block = vec![7_u8; 64 << 10];
    let mut hasher = Sha256::new();
    for _ in 0..workload.nbytes() / (64 << 10) {
        hasher.update(std::hint::black_box(&block));
    }
    std::hint::black_box(hasher.finalize());
}

/// Peak of torch's allocations in a first step, over the bytes of the gradients.
#[allow(clippy::cast_precision_loss)] // Of counts far below 2^53.
fn extra_over_gradients(_: &mut SyncSession, held: &Held, workload: Workload, calls: u64) -> f64 {
    // In a session of its own, so that buffers of earlier steps do not hide what a first step takes.
    let place = sft_sync::InProcess::new().expect("a store");
    let mut alone = SyncSession::builder()
        .rendezvous(Rendezvous::InProcess(place))
        .rank(0)
        .world_size(1)
        .build()
        .expect("one rank connects");
    let counted = count_allocations();
    alone.synchronize_gradients(calls, &held.parameters).expect("sync");
    counted().peak_bytes as f64 / workload.nbytes() as f64
}
